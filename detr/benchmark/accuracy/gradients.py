"""How far the gradients of a configuration are from those of float64, at the weights of a checkpoint.

Shapes: N images, S = sum(H_l * W_l) cells of L levels, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detr.engine.optim import LINEAR_PROJ_NAMES
from detr.engine.precision import Precision
from detr.losses import HungarianMatcher, SetCriterion
from detr.losses.matcher import Matches, MatchingProblem
from detr.models.decoder import DecoderLayer
from detr.models.deformable_detr import DeformableDETR
from detr.models.encoder import EncoderLayer
from detr.models.levels import LevelGeometry
from detr.structures import Batch

# what keeps gradients in the range of float16; a training run finds its own scale
FP16_LOSS_SCALE = 1024.0


class FirstMatches(HungarianMatcher):
    """Matches once, and gives the same answer from then on: rounding must not change what is learned from what.

    Args:
        matcher: Its costs count.
    """

    def __init__(self, matcher: HungarianMatcher) -> None:
        super().__init__(
            cost_class=matcher.cost_class,
            cost_bbox=matcher.cost_bbox,
            cost_giou=matcher.cost_giou,
            focal_alpha=matcher.focal_alpha,
            focal_gamma=matcher.focal_gamma,
        )
        self._matches: list[Matches] | None = None

    def match(self, problems: Sequence[MatchingProblem]) -> list[Matches]:
        if self._matches is None:
            self._matches = super().match(problems)
        return self._matches


@dataclass(frozen=True)
class ModelGradients:
    """Gradients of one backward pass, in float64.

    Attributes:
        loss: Of the batch.
        parameters: By name; those that train.
        values: Of the value of each deformable attention, by layer: L tensors (N, H_l * W_l, C).
    """

    loss: float
    parameters: dict[str, Tensor]
    values: dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Distance:
    """How far a gradient is from the one in float64.

    Attributes:
        quantity: What it is the gradient of.
        error: Norm of the difference over the norm of the float64 gradient; not finite where the gradient is not.
        cosine: Of the angle between both; 1 is the same direction.
    """

    quantity: str
    error: float
    cosine: float


def model_gradients(
    model: DeformableDETR,
    criterion: SetCriterion,
    batch: Batch,
    *,
    precision: Precision,
    device: torch.device,
) -> ModelGradients:
    """Forward and backward of one batch, without dropout.

    Args:
        model: On `device`, in evaluation mode; its gradients are overwritten.
        criterion: On `device`, with a matcher that gives the same answer to all that are compared (`FirstMatches`).
        batch: On the CPU.
        precision: Of the pass; a model in float64 takes fp32, which leaves it as it is.
        device: Where to compute.
    """
    precision.prepare(device)
    values: dict[str, tuple[Tensor, tuple[tuple[int, int], ...]]] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, EncoderLayer | DecoderLayer):
            handles += _ValueProbe(name, values).attach(layer)
    scale = FP16_LOSS_SCALE if precision.name == "fp16" else 1.0
    model.zero_grad(set_to_none=True)
    num_boxes = max(1, sum(len(target.labels) for target in batch.targets))
    try:
        with precision.autocast(device):
            output = model(batch.images.to(device))
        loss = criterion(output, batch.targets, num_boxes).total
        (scale * loss).backward()
    finally:
        for handle in handles:
            handle.remove()
    parameters = {
        name: parameter.grad.double() / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    by_level = {}
    for name, (value, shapes) in values.items():
        assert value.grad is not None
        by_level[name] = (value.grad.double() / scale).split([H * W for H, W in shapes], dim=1)
    return ModelGradients(float(loss.detach()), parameters, by_level)


class _ValueProbe:
    """Keeps the gradient of a layer's value."""

    def __init__(self, name: str, found: dict[str, tuple[Tensor, tuple[tuple[int, int], ...]]]) -> None:
        self._name = name
        self._found = found
        self._shapes: tuple[tuple[int, int], ...] = ()

    def attach(self, layer: nn.Module) -> list[Any]:
        handles: list[Any] = [layer.register_forward_pre_hook(self._before)]
        if isinstance(layer, EncoderLayer):
            projection = layer.self_attn.value_proj
            handles.append(projection.register_forward_hook(self._projected))
        return handles

    def _before(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # of an encoder layer: memory, position, reference_points, levels
        # of a decoder layer: queries, query_pos, reference_points, value, levels
        levels: LevelGeometry = args[-1]
        self._shapes = levels.spatial_shapes
        if isinstance(layer, DecoderLayer):
            self._keep(args[3])

    def _projected(self, projection: nn.Module, args: tuple[Any, ...], value: Tensor) -> None:
        self._keep(value)

    def _keep(self, value: Tensor) -> None:
        value.retain_grad()
        self._found[self._name] = (value, self._shapes)


def gradient_distances(found: ModelGradients, exact: ModelGradients) -> list[Distance]:
    """Of all parameters, of parts of them, and of the values of encoder and decoder by level."""
    groups: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, gradient in exact.parameters.items():
        pair = (found.parameters[name], gradient)
        parts = ["all parameters", name.split(".")[0]]
        if any(part in name for part in LINEAR_PROJ_NAMES):
            parts.append("sampling offsets and reference points")
        for part in parts:
            groups.setdefault(part, []).append(pair)
    for layer, levels in exact.values.items():
        for level, gradient in enumerate(levels):
            quantity = f"{layer.split('.')[0]} value, level {level}"
            groups.setdefault(quantity, []).append((found.values[layer][level], gradient))
    return [_distance(quantity, pairs) for quantity, pairs in groups.items()]


def _distance(quantity: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Distance:
    sums = torch.zeros(4, dtype=torch.float64)
    for gradient, exact in pairs:
        difference = gradient - exact
        parts = (difference.square(), exact.square(), gradient.square(), gradient * exact)
        sums += torch.stack([part.sum() for part in parts]).cpu()
    error, norm, own_norm, product = sums.tolist()
    return Distance(
        quantity,
        error=(error / norm) ** 0.5 if norm else float("nan"),
        cosine=product / (norm * own_norm) ** 0.5 if norm * own_norm else float("nan"),
    )
