"""The MSDA operator as functions: the contract of shapes and dtypes, and its error messages.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, Lq queries, L levels, P points.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.msda.config import KernelConfig
from ops.msda.dispatch import resolve
from ops.msda.reference import ms_deform_attn_reference

SpatialShapes = Sequence[tuple[int, int]] | Tensor


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    kernel: KernelConfig | None = None,
) -> Tensor:
    """Multi-scale deformable attention: a weighted sum of bilinear samples from several feature maps.

    Equation 3 of Deformable DETR (arXiv 2010.04159) between its value and output projections. Half-pixel
    centres, zeros outside the maps. A location that is NaN, infinite or outside contributes zero.

    Args:
        value: (N, S, M, D), the levels one after the other, each row-major. Any floating dtype.
        spatial_shapes: L pairs (H, W) with sum(H * W) == S: Python ints, or an integer tensor (L, 2) on the
            CPU. A CUDA tensor raises: reading it would stall the GPU.
        sampling_locations: (N, Lq, M, L, P, 2) as (x, y), [0, 1] spans a level from border to border.
            Any floating dtype, computed in float32 at least; pass float32, since bfloat16 holds only 8 bits.
        attention_weights: (N, Lq, M, L, P), usually a softmax over L * P. Any floating dtype.
        kernel: Backend, accumulator and determinism; None means `KernelConfig()`.

    Returns:
        (N, Lq, M * D) in the dtype of `value`.

    Raises:
        ValueError: A shape, dtype or device does not fit; the message names the argument.
        BackendUnavailable: `kernel` names a backend that cannot run here.

    Example:
        >>> value = torch.rand(2, 4 * 6 + 2 * 3, 8, 32)
        >>> locations, weights = torch.rand(2, 10, 8, 2, 4, 2), torch.rand(2, 10, 8, 2, 4).flatten(-2)
        >>> weights = weights.softmax(-1).unflatten(-1, (2, 4))
        >>> ms_deform_attn(value, ((4, 6), (2, 3)), locations, weights).shape
        torch.Size([2, 10, 256])
    """
    shapes = host_spatial_shapes(spatial_shapes)
    _check_value(value, shapes)
    N, _, M, _ = value.shape
    L = len(shapes)
    _check_tensor("sampling_locations", sampling_locations, value, "(N, Lq, M, L, P, 2)", 6)
    _check_tensor("attention_weights", attention_weights, value, "(N, Lq, M, L, P)", 5)
    Lq, P = sampling_locations.shape[1], sampling_locations.shape[4]
    _check_shape("sampling_locations", sampling_locations, (N, Lq, M, L, P, 2), "(N, Lq, M, L, P, 2)")
    _check_shape("attention_weights", attention_weights, (N, Lq, M, L, P), "(N, Lq, M, L, P)")

    resolve(kernel or KernelConfig(), value)
    return ms_deform_attn_reference(value, shapes, sampling_locations, attention_weights)


def ms_deform_attn_fused(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    valid_sizes: Tensor | None = None,
    kernel: KernelConfig | None = None,
) -> Tensor:
    """`ms_deform_attn` from what the projections give: offsets and logits instead of locations and weights.

    Weights are a softmax of the logits over L * P. Locations follow Deformable DETR, appendix A:

    - 2-d reference points (x, y): location = reference + offset / (W_l, H_l);
    - 4-d reference boxes (cx, cy, w, h): location = centre + offset / P * (w, h) / 2.

    Args:
        value: (N, S, M, D), see `ms_deform_attn`.
        spatial_shapes: L pairs (H, W), see `ms_deform_attn`.
        reference_points: (N, Lq, L, 2) or (N, Lq, L, 4), normalised to each padded level.
        sampling_offsets: (N, Lq, M, L, P, 2) as (x, y): in pixels of the level for points, in halves of
            the box times P for boxes.
        attention_logits: (N, Lq, M, L, P), before the softmax.
        valid_sizes: (N, L, 2) integers (h, w), the cells of each level that are image and not padding.
            The rest of `value` (rows from h, columns from w) counts as zero. None: everything is valid.
        kernel: See `ms_deform_attn`.

    Returns:
        (N, Lq, M * D) in the dtype of `value`.

    Raises:
        ValueError: A shape, dtype or device does not fit; the message names the argument.
        BackendUnavailable: `kernel` names a backend that cannot run here.
    """
    shapes = host_spatial_shapes(spatial_shapes)
    _check_value(value, shapes)
    N, _, M, _ = value.shape
    L = len(shapes)
    _check_tensor("sampling_offsets", sampling_offsets, value, "(N, Lq, M, L, P, 2)", 6)
    _check_tensor("attention_logits", attention_logits, value, "(N, Lq, M, L, P)", 5)
    _check_tensor("reference_points", reference_points, value, "(N, Lq, L, 2 or 4)", 4)
    Lq, P = sampling_offsets.shape[1], sampling_offsets.shape[4]
    _check_shape("sampling_offsets", sampling_offsets, (N, Lq, M, L, P, 2), "(N, Lq, M, L, P, 2)")
    _check_shape("attention_logits", attention_logits, (N, Lq, M, L, P), "(N, Lq, M, L, P)")
    if reference_points.shape[-1] not in (2, 4):
        raise ValueError(
            f"reference_points must end in 2 (points x, y) or 4 (boxes cx, cy, w, h); "
            f"got shape {tuple(reference_points.shape)}"
        )
    box_dim = reference_points.shape[-1]
    _check_shape("reference_points", reference_points, (N, Lq, L, box_dim), "(N, Lq, L, 2 or 4)")

    resolve(kernel or KernelConfig(), value)
    if valid_sizes is not None:
        _check_valid_sizes(valid_sizes, value, (N, L, 2))
        value = zero_padding(value, shapes, valid_sizes)
    locations = sampling_locations_from_offsets(reference_points, sampling_offsets, shapes)
    weights_dtype = torch.promote_types(attention_logits.dtype, torch.float32)
    weights = attention_logits.flatten(-2).softmax(-1, dtype=weights_dtype)  # (N, Lq, M, L*P)
    weights = weights.unflatten(-1, (L, P))  # (N, Lq, M, L, P)
    return ms_deform_attn_reference(value, shapes, locations, weights)


def sampling_locations_from_offsets(
    reference_points: Tensor, sampling_offsets: Tensor, spatial_shapes: tuple[tuple[int, int], ...]
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


def zero_padding(
    value: Tensor, spatial_shapes: tuple[tuple[int, int], ...], valid_sizes: Tensor
) -> Tensor:
    """`value` (N, S, M, D) with every cell outside `valid_sizes` (N, L, 2) set to zero."""
    masks = []
    for level, (H, W) in enumerate(spatial_shapes):
        rows = torch.arange(H, device=value.device) < valid_sizes[:, level, 0, None]  # (N, H)
        columns = torch.arange(W, device=value.device) < valid_sizes[:, level, 1, None]  # (N, W)
        masks.append((rows[:, :, None] & columns[:, None, :]).flatten(1))  # (N, H*W)
    valid = torch.cat(masks, dim=1)  # (N, S)
    return value.masked_fill(~valid[:, :, None, None], 0)


def host_spatial_shapes(spatial_shapes: SpatialShapes) -> tuple[tuple[int, int], ...]:
    """`spatial_shapes` as a tuple of (H, W) ints, checked.

    Raises:
        ValueError: A CUDA tensor, no levels, or an entry that is not a pair of positive ints.
    """
    if isinstance(spatial_shapes, Tensor):
        if spatial_shapes.device.type != "cpu":
            raise ValueError(
                f"spatial_shapes must live on the host; got a tensor on {spatial_shapes.device}. Pass a tuple "
                "of (H, W) ints made once a batch (reading a device tensor here would stall every layer)"
            )
        if spatial_shapes.is_floating_point() or spatial_shapes.ndim != 2 or spatial_shapes.shape[1] != 2:
            raise ValueError(
                f"spatial_shapes must be L pairs (H, W) of ints; got a {spatial_shapes.dtype} tensor of "
                f"shape {tuple(spatial_shapes.shape)}"
            )
        spatial_shapes = spatial_shapes.tolist()
    shapes = tuple(tuple(pair) for pair in spatial_shapes)
    if not shapes:
        raise ValueError("spatial_shapes must hold at least one (H, W) pair; got none")
    for level, pair in enumerate(shapes):
        if len(pair) != 2 or any(side < 1 for side in pair):
            raise ValueError(
                f"spatial_shapes[{level}] must be a pair (H, W) of positive ints; got {pair!r}"
            )
    return shapes  # type: ignore[return-value]


def _check_value(value: Tensor, shapes: tuple[tuple[int, int], ...]) -> None:
    if value.ndim != 4:
        raise ValueError(f"value must be (N, S, M, D); got shape {tuple(value.shape)}")
    _check_floating("value", value)
    S = sum(H * W for H, W in shapes)
    if value.shape[1] != S:
        raise ValueError(
            f"value must hold S = sum(H * W) = {S} cells in dimension 1 for spatial_shapes={shapes}; "
            f"got {value.shape[1]} in shape {tuple(value.shape)}. Is the order (H, W), and are all levels there?"
        )


def _check_tensor(name: str, tensor: Tensor, value: Tensor, legend: str, ndim: int) -> None:
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must be {legend}; got shape {tuple(tensor.shape)}")
    _check_floating(name, tensor)
    if tensor.device != value.device:
        raise ValueError(f"{name} must be on {value.device} like value; got {tensor.device}. Move it there first")


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating dtype; got {tensor.dtype}. Convert it explicitly")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], legend: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{name} must be {legend} = {expected}, fitting value and spatial_shapes; "
            f"got shape {tuple(tensor.shape)}"
        )


def _check_valid_sizes(valid_sizes: Tensor, value: Tensor, expected: tuple[int, ...]) -> None:
    if valid_sizes.is_floating_point() or valid_sizes.dtype == torch.bool:
        raise ValueError(f"valid_sizes must hold integers (h, w); got {valid_sizes.dtype}")
    _check_shape("valid_sizes", valid_sizes, expected, "(N, L, 2)")
    if valid_sizes.device != value.device:
        raise ValueError(f"valid_sizes must be on {value.device} like value; got {valid_sizes.device}")
