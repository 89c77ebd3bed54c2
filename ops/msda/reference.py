"""The MSDA contract in plain PyTorch: one bilinear sampling a level.

Defines border and coordinate semantics for every backend. Written to be read, not to be fast.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, Lq queries, L levels, P points.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ops.msda.sampling import sample

SpatialShapes = tuple[tuple[int, int], ...]
Sampler = Callable[[Tensor, Tensor], Tensor]


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    sampler: Sampler = sample,
) -> Tensor:
    """Deformable DETR, equation 3, after the projections.

    Samples bilinearly with half-pixel centres (x_px = x * W - 0.5) and zeros outside the map. A location
    that is not finite, or whose four neighbours are all outside (x_px <= -1, x_px >= W, likewise in y),
    contributes exactly zero to the output and to every gradient.

    The arithmetic is in float32, or in float64 when any argument is; the output has the dtype of `value`.

    Args:
        value, spatial_shapes, sampling_locations, attention_weights: See `ops.ms_deform_attn`.
        sampler: One of `ops.msda.sampling`.
    """
    N, _, M, D = value.shape
    _, Lq, _, _, P, _ = sampling_locations.shape
    compute_dtype = torch.float32
    for tensor in (value, sampling_locations, attention_weights):
        compute_dtype = torch.promote_types(compute_dtype, tensor.dtype)
    locations = sampling_locations.to(compute_dtype)
    weights = attention_weights.to(compute_dtype)

    levels = value.to(compute_dtype).split([H * W for H, W in spatial_shapes], dim=1)
    output = value.new_zeros((N * M, D, Lq), dtype=compute_dtype)
    for level, (H, W) in enumerate(spatial_shapes):
        # (N, H*W, M, D) -> (N*M, D, H, W)
        value_l = levels[level].permute(0, 2, 3, 1).reshape(N * M, D, H, W)
        # (N, Lq, M, P, 2) -> (N*M, Lq, P, 2)
        locations_l = locations[:, :, :, level].permute(0, 2, 1, 3, 4).reshape(N * M, Lq, P, 2)
        weights_l = weights[:, :, :, level].permute(0, 2, 1, 3).reshape(N * M, 1, Lq, P)
        x = locations_l[..., 0] * W - 0.5
        y = locations_l[..., 1] * H - 0.5
        inside = (x > -1) & (x < W) & (y > -1) & (y < H)
        # the samplers cast coordinates to int, so NaN and 1e30 must not reach them; -3 in their [-1, 1] frame
        # is beyond the border of any map, hence zero with zero gradient
        grid = torch.where(inside[..., None], 2 * locations_l - 1, -3.0)
        sampled = sampler(value_l, grid)
        output = output + (sampled * weights_l).sum(-1)  # (N*M, D, Lq)

    # (N*M, D, Lq) -> (N, Lq, M*D)
    output = output.view(N, M * D, Lq).transpose(1, 2)
    return output.to(value.dtype)


def ms_deform_attn_fused_reference(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    valid_sizes: Tensor | None,
    *,
    sampler: Sampler = sample,
) -> Tensor:
    """The fused form, composed of its parts; arguments as in `ops.ms_deform_attn_fused`."""
    if valid_sizes is not None:
        value = zero_padding(value, spatial_shapes, valid_sizes)
    locations = sampling_locations_from_offsets(reference_points, sampling_offsets, spatial_shapes)
    weights = attention_weights_from_logits(attention_logits)
    return ms_deform_attn_reference(value, spatial_shapes, locations, weights, sampler=sampler)


def attention_weights_from_logits(attention_logits: Tensor) -> Tensor:
    """Softmax over L * P of (N, Lq, M, L, P), float32 at least. A row that is all -inf is masked: weights 0."""
    dtype = torch.promote_types(attention_logits.dtype, torch.float32)
    logits = attention_logits.flatten(-2)  # (N, Lq, M, L*P)
    masked = (logits == -torch.inf).all(-1, keepdim=True)
    # softmax of a row of -inf is NaN, and its gradient too
    weights = logits.masked_fill(masked, 0).softmax(-1, dtype=dtype).masked_fill(masked, 0)
    return weights.view(attention_logits.shape)


def sampling_locations_from_offsets(
    reference_points: Tensor, sampling_offsets: Tensor, spatial_shapes: SpatialShapes
) -> Tensor:
    """Locations (N, Lq, M, L, P, 2) as (x, y), float32 at least; arguments as in `ms_deform_attn_fused`."""
    dtype = torch.promote_types(reference_points.dtype, sampling_offsets.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    reference_points = reference_points.to(dtype)[:, :, None, :, None]  # (N, Lq, 1, L, 1, 2 or 4)
    sampling_offsets = sampling_offsets.to(dtype)
    if reference_points.shape[-1] == 4:
        P = sampling_offsets.shape[-2]
        return reference_points[..., :2] + sampling_offsets / P * reference_points[..., 2:] * 0.5
    # (W, H) in this order: offsets are (x, y). Python scalars a level, since a list made into a CUDA tensor
    # would stall the host.
    levels = [
        torch.stack((sampling_offsets[:, :, :, i, :, 0] / W, sampling_offsets[:, :, :, i, :, 1] / H), dim=-1)
        for i, (H, W) in enumerate(spatial_shapes)
    ]
    return reference_points + torch.stack(levels, dim=3)


def zero_padding(value: Tensor, spatial_shapes: SpatialShapes, valid_sizes: Tensor) -> Tensor:
    """`value` (N, S, M, D) with every cell outside `valid_sizes` (N, L, 2) set to zero."""
    masks = []
    for level, (H, W) in enumerate(spatial_shapes):
        rows = torch.arange(H, device=value.device) < valid_sizes[:, level, 0, None]  # (N, H)
        columns = torch.arange(W, device=value.device) < valid_sizes[:, level, 1, None]  # (N, W)
        masks.append((rows[:, :, None] & columns[:, None, :]).flatten(1))  # (N, H*W)
    valid = torch.cat(masks, dim=1)  # (N, S)
    return value.masked_fill(~valid[:, :, None, None], 0)
