"""Where deformable attention looks: locations and weights of every layer of one forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from detr.models.decoder import DecoderLayer
from detr.models.deformable_detr import DeformableDETR
from detr.models.encoder import EncoderLayer
from detr.models.levels import LevelGeometry
from ops import MSDeformAttn
from ops.msda.reference import attention_weights_from_logits, sampling_locations_from_offsets


@dataclass(frozen=True)
class LayerSampling:
    """The samples of one attention layer.

    Attributes:
        name: As in the model, "encoder.layers.0" or "decoder.layers.5".
        locations: (N, Lq, M, L, P, 2) as (x, y), [0, 1] spans a padded level.
        weights: (N, Lq, M, L, P), summing to 1 over L and P.
        centres: (N, Lq, L, 2) as (x, y), what each query looks around.
        spatial_shapes: L pairs (H, W) of the padded levels.
        is_query: (N, Lq) bool, False for encoder queries in the padding.
        valid_ratios: (N, L, 2) share (w, h) of each level that is image.
    """

    name: str
    locations: Tensor
    weights: Tensor
    centres: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    is_query: Tensor
    valid_ratios: Tensor

    def offsets_px(self) -> Tensor:
        """(N, Lq, M, L, P, 2) as (x, y): samples from their centre, in cells of the level they are on."""
        sizes = torch.tensor([(W, H) for H, W in self.spatial_shapes], device=self.locations.device)  # (L, 2)
        return (self.locations - self.centres[:, :, None, :, None]) * sizes[:, None]


@contextmanager
def record_sampling(model: DeformableDETR) -> Iterator[list[LayerSampling]]:
    """Collect what every attention layer samples while the block runs; the model computes as always.

    Example:
        >>> with record_sampling(model) as layers:  # doctest: +SKIP
        ...     model(images)
    """
    found: list[LayerSampling] = []
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, EncoderLayer | DecoderLayer):
            is_encoder = isinstance(layer, EncoderLayer)
            attention = cast(MSDeformAttn, layer.self_attn if is_encoder else layer.cross_attn)
            recorder = _Recorder(name, attention, is_encoder, found)
            handles += [
                layer.register_forward_pre_hook(recorder.before),
                attention.sampling_offsets.register_forward_hook(recorder.offsets),
                attention.attention_weights.register_forward_hook(recorder.logits),
                layer.register_forward_hook(recorder.after),
            ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def level_strides(model: DeformableDETR) -> tuple[int, ...]:
    """Pixels of the resized image that a cell of each level is wide."""
    num_levels = model.level_embed.shape[0]
    strides = list(model.backbone.strides)[-num_levels:]
    while len(strides) < num_levels:
        # each further level is a convolution of stride 2 on the one before
        strides.append(2 * strides[-1])
    return tuple(strides)


class _Recorder:
    """Puts together what the parts of one layer see."""

    def __init__(self, name: str, attention: MSDeformAttn, is_encoder: bool, found: list[LayerSampling]) -> None:
        self._name = name
        self._shape = (attention.num_heads, attention.num_levels, attention.num_points)
        self._is_encoder = is_encoder
        self._found = found
        self._seen: dict[str, Any] = {}

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # of an encoder layer: memory, position, reference_points, levels
        # of a decoder layer: queries, query_pos, reference_points, value, levels
        self._seen = {"reference_points": args[2], "levels": args[-1]}

    def offsets(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._seen["offsets"] = output.detach().unflatten(-1, (*self._shape, 2))

    def logits(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._seen["logits"] = output.detach().unflatten(-1, self._shape)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        levels: LevelGeometry = self._seen["levels"]
        reference_points: Tensor = self._seen["reference_points"].detach()
        is_query = torch.ones(reference_points.shape[:2], dtype=torch.bool, device=reference_points.device)
        if self._is_encoder:
            is_query = ~torch.cat([mask.flatten(1) for mask in levels.padding_masks], dim=1)  # (N, S)
        self._found.append(
            LayerSampling(
                name=self._name,
                locations=sampling_locations_from_offsets(
                    reference_points, self._seen["offsets"], levels.spatial_shapes
                ),
                weights=attention_weights_from_logits(self._seen["logits"]),
                centres=reference_points[..., :2].float(),
                spatial_shapes=levels.spatial_shapes,
                is_query=is_query,
                valid_ratios=levels.valid_ratios,
            )
        )
        self._seen = {}
