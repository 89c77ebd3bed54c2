"""The MSDA contract in plain PyTorch: one grid_sample a level.

Defines border and coordinate semantics for every backend. Written to be read, not to be fast.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, Lq queries, L levels, P points.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ms_deform_attn_reference(
    value: Tensor,
    spatial_shapes: tuple[tuple[int, int], ...],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Deformable DETR, equation 3, after the projections.

    Samples bilinearly with half-pixel centres (x_px = x * W - 0.5) and zeros outside the map. A location
    that is not finite, or whose four neighbours are all outside (x_px <= -1, x_px >= W, likewise in y),
    contributes exactly zero to the output and to every gradient.

    The arithmetic is in float32, or in float64 when any argument is; the output has the dtype of `value`.

    Args: see `ops.ms_deform_attn`.
    """
    N, _, M, D = value.shape
    _, Lq, _, L, P, _ = sampling_locations.shape
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
        # grid_sample casts coordinates to int, so NaN and 1e30 must not reach it; -3 in its [-1, 1] frame
        # is beyond the border of any map, hence zero with zero gradient
        grid = torch.where(inside[..., None], 2 * locations_l - 1, -3.0)
        sampled = F.grid_sample(value_l, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        output = output + (sampled * weights_l).sum(-1)  # (N*M, D, Lq)

    # (N*M, D, Lq) -> (N, Lq, M*D)
    output = output.view(N, M * D, Lq).transpose(1, 2)
    return output.to(value.dtype)
