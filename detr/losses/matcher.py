"""Hungarian matching of queries to boxes, for all decoder layers at once.

Shapes: K layers, N images, Lq queries, C classes, T the most boxes of any image, R matched pairs of a layer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr.boxes import paired_generalized_box_iou
from detr.dtypes import at_least_float32
from detr.losses.candidates import cheapest_candidates
from detr.losses.matches import Matches, assign_on_device, matches_from_host
from detr.losses.padded_targets import PaddedTargets
from detr.rank_logging import OF_THIS_RANK
from detr.telemetry.host_copy import HostCopy
from ops import assign_runs_on

logger = logging.getLogger(__name__)

Solver = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class MatchingProblem:
    """Predictions of K layers with Lq queries each, and the targets they are matched to.

    Attributes:
        logits: (K, N, Lq, C), before the sigmoid.
        boxes: (K, N, Lq, 4), (cx, cy, w, h) in [0, 1].
        targets: Of the N images, on the same device.
    """

    logits: Tensor
    boxes: Tensor
    targets: PaddedTargets


class HungarianMatcher(nn.Module):
    """Cheapest one-to-one assignment by class, L1 and generalised IoU (recipe, section 5.1).

    Only queries that a cheapest assignment can need take part (`detr.losses.candidates`).
    With solver="host" the costs of all layers go to the host in one copy, the only point of a training step where the
    host waits for the device; scipy solves them there. With solver="device" they stay (`ops.assign`), and nothing
    waits: costs that are not finite are then reported at the next call.

    Args:
        solver: host | device | auto: device for predictions on a GPU where the kernel runs, else host. Both find the
            cheapest assignment; among equally cheap ones their choice may differ.
        cost_class: Weight of the focal classification cost.
        cost_bbox: Weight of the L1 distance of (cx, cy, w, h).
        cost_giou: Weight of the negative generalised IoU.
        focal_alpha: Of the classification cost.
        focal_gamma: Of the classification cost.
    """

    def __init__(
        self,
        *,
        solver: Solver = "auto",
        cost_class: float = 2.0,
        cost_bbox: float = 5.0,
        cost_giou: float = 2.0,
        focal_alpha: float = 0.25,
        focal_gamma: float = 2.0,
    ) -> None:
        super().__init__()
        if cost_class == cost_bbox == cost_giou == 0:
            raise ValueError("HungarianMatcher: at least one of cost_class, cost_bbox, cost_giou must not be 0")
        if solver not in get_args(Solver):
            raise ValueError(f"criterion.matcher.solver must be auto, host or device; got {solver!r}")
        self.solver = solver
        self.cost_class = cost_class
        self.cost_bbox = cost_bbox
        self.cost_giou = cost_giou
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma
        # batches in which a cost was not finite; said with each warning
        self.num_nonfinite_batches = 0
        self._warned_crowded = False
        # of the last call with solver="device": not finite costs of each image, of how many, and the images' ids
        self._nonfinite_reports: list[tuple[HostCopy, int, tuple[int, ...]]] = []

    def forward(self, problem: MatchingProblem) -> Matches:
        """Match every layer on its own; see `match`."""
        return self.match([problem])[0]

    @torch.no_grad()
    def match(self, problems: Sequence[MatchingProblem]) -> list[Matches]:
        """Solve several problems, with one copy to the host at most: decoder layers and proposals differ in Lq.

        Raises:
            ValueError: A label is not in [0, C), or a target box is not finite or not in [0, 1].
        """
        for problem in problems:
            self._warn_if_crowded(problem)
        if self._solves_on_device(problems[0].logits.device):
            return self._match_on_device(problems)
        found = [self._candidates(problem) for problem in problems]
        # what is faulty rides along in the one copy: by itself it would cost more stalls
        parts = [
            part.to(found[0].cost.dtype).flatten()
            for candidates, problem in zip(found, problems, strict=True)
            for part in (candidates.cost, candidates.num_nonfinite, *_target_faults(problem))
        ]
        host_parts = np.split(torch.cat(parts).cpu().numpy(), np.cumsum([part.numel() for part in parts])[:-1])
        matches = []
        for index, (candidates, problem) in enumerate(zip(found, problems, strict=True)):
            host_cost, num_bad, bad_labels, bad_boxes = host_parts[4 * index : 4 * index + 4]
            _raise_on_faults(bad_labels, bad_boxes, problem)
            self._warn_if_nonfinite(num_bad, candidates.num_costs, problem.targets.image_ids)
            table = _solve_on_host(host_cost.reshape(candidates.cost.shape), problem.targets.counts)
            matches.append(candidates.of_queries(matches_from_host(table, problem.logits.device)))
        return matches

    def _solves_on_device(self, device: torch.device) -> bool:
        if self.solver == "auto":
            return device.type == "cuda" and assign_runs_on(device)
        return self.solver == "device"

    def _match_on_device(self, problems: Sequence[MatchingProblem]) -> list[Matches]:
        for problem in problems:
            # a wait only for targets that were on the device already
            bad_labels, bad_boxes = _target_faults(problem, on_host=True)
            _raise_on_faults(bad_labels.numpy(), bad_boxes.numpy(), problem)
        reports, self._nonfinite_reports = self._nonfinite_reports, []
        for report, num_costs, image_ids in reports:
            # of the step before: by now the device has passed it, or is about to
            self._warn_if_nonfinite(report.read().numpy(), num_costs, image_ids)
        matches = []
        for problem in problems:
            candidates = self._candidates(problem)
            self._nonfinite_reports.append(
                (HostCopy(candidates.num_nonfinite), candidates.num_costs, problem.targets.image_ids)
            )
            matches.append(candidates.of_queries(assign_on_device(candidates.cost, problem.targets.counts)))
        return matches

    def _candidates(self, problem: MatchingProblem) -> "_Candidates":
        cost, num_nonfinite = self._finite(self.cost(problem))
        num_costs = cost.numel()
        return _Candidates(*cheapest_candidates(cost), num_nonfinite, num_costs)

    def compile_arithmetic(self) -> None:
        """Run the costs through torch.compile from now on, for any numbers of boxes."""
        self.cost = torch.compile(self.cost, fullgraph=True, dynamic=True)  # type: ignore[method-assign]
        self._finite = torch.compile(self._finite, fullgraph=True, dynamic=True)  # type: ignore[method-assign]

    def cost(self, problem: MatchingProblem) -> Tensor:
        """Cost (K, N, Lq, T) of giving each box to each query, float32 at least."""
        logits, boxes, targets = problem.logits, problem.boxes, problem.targets
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

    def _finite(self, costs: Tensor) -> tuple[Tensor, Tensor]:
        """Costs that can be solved: what is not finite becomes dearer than all that is; and how many of each image
        were not, (N,) int64."""
        finite = costs.isfinite()
        worst = costs.where(finite, 0).amax().clamp(min=0) if costs.numel() else costs.new_zeros(())
        return costs.where(finite, worst + 1), finite.logical_not().sum((0, 2, 3))

    def _warn_if_nonfinite(self, num_bad: NDArray[np.integer], num_costs: int, image_ids: Sequence[int]) -> None:
        """Report a problem of `num_costs` costs by the number (N,) of those of each image that are not finite."""
        if not num_bad.any():
            return
        self.num_nonfinite_batches += 1
        logger.warning(
            "matcher: %d of %d costs are not finite (batch %d with this fault, images %s): the model predicted NaN "
            "or infinity. They are matched last; lower the learning rate or use precision=fp32 if this goes on",
            int(num_bad.sum()),
            num_costs,
            self.num_nonfinite_batches,
            [image_ids[index] for index in num_bad.nonzero()[0].tolist()][:10],
            extra=OF_THIS_RANK,
        )

    def _warn_if_crowded(self, problem: MatchingProblem) -> None:
        num_queries, targets = problem.logits.shape[2], problem.targets
        most = max(targets.counts, default=0)
        if self._warned_crowded or most <= num_queries:
            return
        self._warned_crowded = True
        logger.warning(
            "image %s has %d boxes but the model has %d queries: the boxes beyond go unmatched. "
            "Set model.num_queries to %d or more (said once a run)",
            targets.image_ids[targets.counts.index(most)],
            most,
            num_queries,
            most,
            extra=OF_THIS_RANK,
        )


@dataclass(frozen=True)
class _Candidates:
    """The queries of a problem that can be matched.

    Attributes:
        cost: (K, N, R, T), finite.
        queries: (K, N, R) int64, which they are; None: all, in order.
        num_nonfinite: (N,) int64, costs of each image that were not finite.
        num_costs: Of all queries and boxes.
    """

    cost: Tensor
    queries: Tensor | None
    num_nonfinite: Tensor
    num_costs: int

    def of_queries(self, matches: Matches) -> Matches:
        """`matches` of candidates as those of queries."""
        if self.queries is None:
            return matches
        layer = torch.arange(len(self.queries), device=self.queries.device)[:, None]  # (K, 1), broadcasts to (K, R)
        return replace(matches, query=self.queries[layer, matches.image, matches.query])


def _solve_on_host(cost: NDArray[np.floating], counts: Sequence[int]) -> NDArray[np.int64]:
    """The table that `matches_from_host` takes, of costs (K, N, R, T)."""
    num_queries = cost.shape[2]
    queries: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    for of_layer in cost:
        pairs = [linear_sum_assignment(of_layer[index, :, :count]) for index, count in enumerate(counts)]
        queries.append(np.concatenate([pair[0] for pair in pairs]))
        rows.append(np.concatenate([pair[1] for pair in pairs]))
    images = np.repeat(np.arange(len(counts)), [min(count, num_queries) for count in counts])
    return np.stack([images, *queries, *rows]).astype(np.int64)


def _target_faults(problem: MatchingProblem, *, on_host: bool = False) -> tuple[Tensor, Tensor]:
    """Where a label is not of the classes, and where a box is not finite or not in [0, 1]; (N, T) bool each."""
    targets = problem.targets
    labels, boxes = targets.labels, targets.boxes
    if on_host:
        labels = labels.cpu() if targets.host_labels is None else targets.host_labels
        boxes = boxes.cpu() if targets.host_boxes is None else targets.host_boxes
    bad_labels = (labels < 0) | (labels >= problem.logits.shape[-1])
    return bad_labels, ~((boxes >= 0) & (boxes <= 1)).all(-1)  # NaN compares false


def _raise_on_faults(
    bad_labels: NDArray[np.floating], bad_boxes: NDArray[np.floating], problem: MatchingProblem
) -> None:
    targets = problem.targets
    wanted = {
        "label": f"must be in [0, {problem.logits.shape[-1]}), the classes of the model; map category ids to "
        "contiguous labels or build the model with more classes",
        "box": "must be finite (cx, cy, w, h) in [0, 1]; divide by the image size and clip to the image",
    }
    for name, faults, values in (("label", bad_labels, targets.labels), ("box", bad_boxes, targets.boxes)):
        for index, row in np.argwhere(faults.reshape(targets.labels.shape) != 0):
            found = values[index, row].tolist()
            raise ValueError(f"image {targets.image_ids[index]}: {name} {row} is {found}; it {wanted[name]}")
