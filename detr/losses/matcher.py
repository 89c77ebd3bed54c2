"""Hungarian matching of queries to boxes, for all decoder layers at once.

Shapes: K layers, N images, Lq queries, C classes, T the most boxes of any image, R matched pairs of a layer.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr.boxes import paired_generalized_box_iou
from detr.dtypes import at_least_float32
from detr.losses.padded_targets import PaddedTargets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matches:
    """Matched pairs; each image gives min(Lq, its boxes) of them in every layer.

    Attributes:
        image: (R,) int64.
        query: (K, R) int64, ascending within an image.
        target: (K, R) int64, row of the image's boxes.
    """

    image: Tensor
    query: Tensor
    target: Tensor


class HungarianMatcher(nn.Module):
    """Cheapest one-to-one assignment by class, L1 and generalised IoU (recipe, section 5.1).

    The costs of all layers go to the host in one copy, the only point of a training step where the host waits
    for the device; scipy solves them there.

    Args:
        cost_class: Weight of the focal classification cost.
        cost_bbox: Weight of the L1 distance of (cx, cy, w, h).
        cost_giou: Weight of the negative generalised IoU.
        focal_alpha: Of the classification cost.
        focal_gamma: Of the classification cost.
    """

    def __init__(
        self,
        *,
        cost_class: float = 2.0,
        cost_bbox: float = 5.0,
        cost_giou: float = 2.0,
        focal_alpha: float = 0.25,
        focal_gamma: float = 2.0,
    ) -> None:
        super().__init__()
        if cost_class == cost_bbox == cost_giou == 0:
            raise ValueError("HungarianMatcher: at least one of cost_class, cost_bbox, cost_giou must not be 0")
        self.cost_class = cost_class
        self.cost_bbox = cost_bbox
        self.cost_giou = cost_giou
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma
        # batches in which a cost was not finite; read by the engine's report
        self.num_nonfinite_batches = 0
        self._warned_crowded = False

    @torch.no_grad()
    def forward(self, logits: Tensor, boxes: Tensor, targets: PaddedTargets) -> Matches:
        """Match every layer on its own.

        Args:
            logits: (K, N, Lq, C), before the sigmoid.
            boxes: (K, N, Lq, 4), (cx, cy, w, h) in [0, 1].
            targets: Of the N images, on the same device.

        Raises:
            ValueError: A label is not in [0, C), or a target box is not finite or not in [0, 1].
        """
        num_layers, _, num_queries, num_classes = logits.shape
        self._warn_if_crowded(targets, num_queries)
        cost = self.cost(logits, boxes, targets)
        bad_labels = (targets.labels < 0) | (targets.labels >= num_classes)
        bad_boxes = ~((targets.boxes >= 0) & (targets.boxes <= 1)).all(-1)
        # target faults ride along in the one copy: by themselves they would cost two more stalls
        packed = torch.cat([cost.flatten(), bad_labels.flatten().to(cost.dtype), bad_boxes.flatten().to(cost.dtype)])
        host = packed.cpu().numpy()
        faults = host[cost.numel() :].reshape(2, *targets.labels.shape)
        _raise_on_faults(faults, targets, num_classes)
        costs = self._finite(host[: cost.numel()].reshape(cost.shape), targets)

        queries: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for layer in range(num_layers):
            pairs = [
                linear_sum_assignment(costs[layer, index, :, :count]) for index, count in enumerate(targets.counts)
            ]
            queries.append(np.concatenate([pair[0] for pair in pairs]))
            rows.append(np.concatenate([pair[1] for pair in pairs]))
        matched = [min(count, num_queries) for count in targets.counts]
        images = np.repeat(np.arange(len(matched)), matched)
        table = torch.from_numpy(np.stack([images, *queries, *rows]).astype(np.int64))  # (1 + 2*K, R)
        if logits.device.type == "cuda":
            table = table.pin_memory()
        table = table.to(logits.device, non_blocking=True)
        return Matches(table[0], table[1 : 1 + num_layers], table[1 + num_layers :])

    def cost(self, logits: Tensor, boxes: Tensor, targets: PaddedTargets) -> Tensor:
        """Cost (K, N, Lq, T) of giving each box to each query, float32 at least; arguments as in `forward`."""
        num_layers, num_images, num_queries, num_classes = logits.shape
        T = targets.labels.shape[1]
        # a label beyond the classes must not fault on the device; `forward` reports it
        labels = targets.labels.clamp(0, num_classes - 1)
        index = labels[None, :, None, :].expand(num_layers, num_images, num_queries, T)
        probability = at_least_float32(logits).sigmoid().gather(-1, index)  # (K, N, Lq, T)
        alpha, gamma = self.focal_alpha, self.focal_gamma
        negative = (1 - alpha) * probability**gamma * -(1 - probability + 1e-8).log()
        positive = alpha * (1 - probability) ** gamma * -(probability + 1e-8).log()

        boxes = at_least_float32(boxes)[:, :, :, None]  # (K, N, Lq, 1, 4)
        target_boxes = targets.boxes[:, None]  # (N, 1, T, 4)
        distance = (boxes - target_boxes).abs().sum(-1)
        giou = paired_generalized_box_iou(
            box_convert(boxes, "cxcywh", "xyxy"), box_convert(target_boxes, "cxcywh", "xyxy")
        )
        return self.cost_class * (positive - negative) + self.cost_bbox * distance - self.cost_giou * giou

    def _finite(self, costs: NDArray[np.floating], targets: PaddedTargets) -> NDArray[np.floating]:
        """Costs that scipy accepts: what is not finite becomes dearer than all that is."""
        finite = np.isfinite(costs)
        if finite.all():
            return costs
        self.num_nonfinite_batches += 1
        bad_images = [targets.image_ids[i] for i in np.unique(np.nonzero(~finite)[1])]
        logger.warning(
            "matcher: %d of %d costs are not finite (batch %d with this fault, images %s): the model predicted NaN "
            "or infinity. They are matched last; lower the learning rate or use precision=fp32 if this goes on",
            int((~finite).sum()),
            costs.size,
            self.num_nonfinite_batches,
            bad_images[:10],
        )
        worst = costs[finite].max(initial=0.0)
        return np.where(finite, costs, worst + 1.0)

    def _warn_if_crowded(self, targets: PaddedTargets, num_queries: int) -> None:
        if self._warned_crowded or max(targets.counts, default=0) <= num_queries:
            return
        self._warned_crowded = True
        most = max(targets.counts)
        logger.warning(
            "image %s has %d boxes but the model has %d queries: the boxes beyond go unmatched. "
            "Set model.num_queries to %d or more (said once a run)",
            targets.image_ids[targets.counts.index(most)],
            most,
            num_queries,
            most,
        )


def _raise_on_faults(faults: NDArray[np.floating], targets: PaddedTargets, num_classes: int) -> None:
    """Raise for the first target that `faults` (2, N, T) marks: wrong labels, then wrong boxes."""
    for kind, message in enumerate(
        (
            f"must be in [0, {num_classes}), the classes of the model; map category ids to contiguous labels or "
            "build the model with more classes",
            "must be finite (cx, cy, w, h) in [0, 1]; divide by the image size and clip to the image",
        )
    ):
        for index, row in np.argwhere(faults[kind] != 0):
            if row < targets.counts[index]:
                name = ("label", "box")[kind]
                found = (targets.labels, targets.boxes)[kind][index, row].tolist()
                raise ValueError(f"image {targets.image_ids[index]}: {name} {row} is {found}; it {message}")
