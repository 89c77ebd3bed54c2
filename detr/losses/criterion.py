"""The training loss: focal classification, L1 and generalised IoU of every layer (recipe, section 5).

Shapes: K layers, N images, Lq queries, C classes, R matched pairs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert, sigmoid_focal_loss

from detr.boxes import paired_generalized_box_iou
from detr.dtypes import at_least_float32
from detr.losses.matcher import HungarianMatcher, MatchingProblem
from detr.losses.matches import Matches
from detr.losses.padded_targets import PaddedTargets
from detr.structures import DetectorOutput, Target


@dataclass(frozen=True)
class LossOutput:
    """A loss and its parts.

    Attributes:
        total: Scalar, weighted sum of all terms; what is differentiated.
        terms: Unweighted scalars: loss_ce, loss_bbox, loss_giou of the last layer, with suffix _0, _1, ... of
            the layers before it, and _enc of the proposals.
        class_error: Scalar in [0, 100], percent of matched queries of the last layer whose highest class is
            wrong; no gradient; 0 if nothing is matched.
    """

    total: Tensor
    terms: dict[str, Tensor]
    class_error: Tensor


class SetCriterion(nn.Module):
    """Deformable DETR's criterion.

    Every image contributes, also one without boxes (all queries negative), and the graph is the same whatever
    the batch holds. Call it outside autocast; logits in a half dtype are taken to float32 here.

    Args:
        num_classes: Classes C of the model.
        matcher: Assigns queries to boxes.
        weight_ce: Weight of the focal loss.
        weight_bbox: Weight of the L1 loss.
        weight_giou: Weight of the generalised IoU loss.
        focal_alpha: Weight of positives in the focal loss.
        focal_gamma: Exponent of the focal loss.
        aux_loss: Train the layers before the last, too.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        matcher: HungarianMatcher,
        weight_ce: float = 2.0,
        weight_bbox: float = 5.0,
        weight_giou: float = 2.0,
        focal_alpha: float = 0.25,
        focal_gamma: float = 2.0,
        aux_loss: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.matcher = matcher
        self.weights = {"loss_ce": weight_ce, "loss_bbox": weight_bbox, "loss_giou": weight_giou}
        self.focal_alpha = focal_alpha
        self.focal_gamma = focal_gamma
        self.aux_loss = aux_loss

    def forward(self, output: DetectorOutput, targets: Sequence[Target], num_boxes: Tensor | float) -> LossOutput:
        """Loss of a batch.

        Args:
            output: Of the model, K layers.
            targets: Of the N images; best left on the CPU, from where they travel padded.
            num_boxes: What sums are divided by: the boxes of the whole optimizer step over the number of
                processes, at least 1. All layers share it.

        Raises:
            ValueError: The model has other classes than the criterion, the numbers of images differ, or a target
                is out of range (see `HungarianMatcher`).
        """
        logits, boxes = output.layer_logits, output.layer_boxes
        if logits.shape[-1] != self.num_classes:
            raise ValueError(
                f"the model has {logits.shape[-1]} classes, the criterion {self.num_classes}; build both with the "
                "same num_classes"
            )
        if logits.shape[1] != len(targets):
            raise ValueError(f"one target an image: got {logits.shape[1]} images and {len(targets)} targets")
        if not self.aux_loss:
            logits, boxes = logits[-1:], boxes[-1:]
        padded = PaddedTargets.from_targets(targets, logits.device)
        problems = [MatchingProblem(logits.detach(), boxes.detach(), padded)]
        proposals = output.enc_outputs
        if proposals is not None:
            problems.append(
                MatchingProblem(
                    proposals.pred_logits.detach()[None], proposals.pred_boxes.detach()[None], padded.as_objects()
                )
            )
        matches, *proposal_matches = self.matcher.match(problems)
        by_layer = self._terms(logits, boxes, padded, matches, num_boxes)
        suffixes = [f"_{layer}" for layer in range(len(logits) - 1)] + [""]
        terms = {
            name + suffix: values[layer] for layer, suffix in enumerate(suffixes) for name, values in by_layer.items()
        }
        total = sum((self.weights[name] * values.sum() for name, values in by_layer.items()), logits.new_zeros(()))
        if proposals is not None:
            of_proposals = self._terms(
                proposals.pred_logits[None],
                proposals.pred_boxes[None],
                problems[1].targets,
                proposal_matches[0],
                num_boxes,
            )
            for name, values in of_proposals.items():
                terms[name + "_enc"] = values[0]
                total = total + self.weights[name] * values[0]
        return LossOutput(total, terms, _class_error(logits[-1].detach(), padded, matches))

    def compile_arithmetic(self) -> None:
        """Run the costs of the matcher and the terms of the loss through torch.compile from now on.

        They are a hundred small kernels, during most of which the GPU waits for the host. One graph serves any
        numbers of boxes; none and one make their own.
        """
        self._terms = torch.compile(self._terms, fullgraph=True, dynamic=True)  # type: ignore[method-assign]
        self.matcher.compile_arithmetic()

    def _terms(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: PaddedTargets,
        matches: Matches,
        num_boxes: Tensor | float,
    ) -> dict[str, Tensor]:
        """Each term of each layer, (K,)."""
        logits, boxes = at_least_float32(logits), at_least_float32(boxes)
        layer = torch.arange(len(logits), device=logits.device)[:, None]  # (K, 1), broadcasts to (K, R)
        matched_labels = targets.labels[matches.image, matches.target]  # (K, R)
        one_hot = torch.zeros_like(logits)  # (K, N, Lq, C)
        # not `one_hot[...] = 1.0`, which sends the number to the device and waits for it
        one_hot.index_put_((layer, matches.image, matches.query, matched_labels), one_hot.new_ones(()))
        focal = sigmoid_focal_loss(logits, one_hot, alpha=self.focal_alpha, gamma=self.focal_gamma)

        matched_boxes = boxes[layer, matches.image, matches.query]  # (K, R, 4)
        target_boxes = targets.boxes[matches.image, matches.target]  # (K, R, 4)
        giou = paired_generalized_box_iou(
            box_convert(matched_boxes, "cxcywh", "xyxy"), box_convert(target_boxes, "cxcywh", "xyxy")
        )
        return {
            "loss_ce": focal.sum((1, 2, 3)) / num_boxes,
            "loss_bbox": (matched_boxes - target_boxes).abs().sum((1, 2)) / num_boxes,
            "loss_giou": (1 - giou).sum(1) / num_boxes,
        }


def _class_error(logits: Tensor, targets: PaddedTargets, matches: Matches) -> Tensor:
    """Percent of the last layer's matched queries (logits (N, Lq, C)) whose highest class is wrong."""
    if matches.image.shape[0] == 0:
        return logits.new_zeros((), dtype=torch.float32)
    predicted = logits[matches.image, matches.query[-1]].argmax(-1)
    wrong = predicted != targets.labels[matches.image, matches.target[-1]]
    return 100 * wrong.float().mean()
