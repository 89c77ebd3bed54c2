"""The MSDA operator as functions: the contract of shapes and dtypes, and its error messages.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, Lq queries, L levels, P points.
"""

import torch
from torch import Tensor

from ops.msda.config import KernelConfig
from ops.msda.contract import (
    SpatialShapes,
    check_kernel,
    check_shape,
    check_tensor,
    check_valid_sizes,
    check_value,
    host_spatial_shapes,
)
from ops.msda.dispatch import resolve
from ops.msda.library import attend
from ops.msda.problem import Problem
from ops.msda.reference import ms_deform_attn_fused_reference, ms_deform_attn_reference
from ops.msda.sampling import gather_sample, sample


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
        TypeError: An argument is no tensor; the message names it.
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
    check_value(value, shapes)
    N, _, M, _ = value.shape
    L = len(shapes)
    check_tensor("sampling_locations", sampling_locations, value, "(N, Lq, M, L, P, 2)", 6)
    check_tensor("attention_weights", attention_weights, value, "(N, Lq, M, L, P)", 5)
    Lq, P = sampling_locations.shape[1], sampling_locations.shape[4]
    check_shape("sampling_locations", sampling_locations, (N, Lq, M, L, P, 2), "(N, Lq, M, L, P, 2)")
    check_shape("attention_weights", attention_weights, (N, Lq, M, L, P), "(N, Lq, M, L, P)")

    return _run(Problem(value, shapes, sampling_locations, attention_weights), check_kernel(kernel))


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
        attention_logits: (N, Lq, M, L, P), before the softmax. A query whose logits are all -inf is masked: it
            gives zero and gets no gradient.
        valid_sizes: (N, L, 2) integers (h, w), the cells of each level that are image and not padding.
            The rest of `value` (rows from h, columns from w) counts as zero. None: everything is valid.
        kernel: See `ms_deform_attn`.

    Returns:
        (N, Lq, M * D) in the dtype of `value`.

    Raises:
        TypeError: An argument is no tensor; the message names it.
        ValueError: A shape, dtype or device does not fit; the message names the argument.
        BackendUnavailable: `kernel` names a backend that cannot run here.
    """
    shapes = host_spatial_shapes(spatial_shapes)
    check_value(value, shapes)
    N, _, M, _ = value.shape
    L = len(shapes)
    check_tensor("sampling_offsets", sampling_offsets, value, "(N, Lq, M, L, P, 2)", 6)
    check_tensor("attention_logits", attention_logits, value, "(N, Lq, M, L, P)", 5)
    check_tensor("reference_points", reference_points, value, "(N, Lq, L, 2 or 4)", 4)
    Lq, P = sampling_offsets.shape[1], sampling_offsets.shape[4]
    check_shape("sampling_offsets", sampling_offsets, (N, Lq, M, L, P, 2), "(N, Lq, M, L, P, 2)")
    check_shape("attention_logits", attention_logits, (N, Lq, M, L, P), "(N, Lq, M, L, P)")
    if reference_points.shape[-1] not in (2, 4):
        raise ValueError(
            f"reference_points must end in 2 (points x, y) or 4 (boxes cx, cy, w, h); "
            f"got shape {tuple(reference_points.shape)}"
        )
    box_dim = reference_points.shape[-1]
    check_shape("reference_points", reference_points, (N, Lq, L, box_dim), "(N, Lq, L, 2 or 4)")

    if valid_sizes is not None:
        check_valid_sizes(valid_sizes, value, (N, L, 2))
    problem = Problem(value, shapes, sampling_offsets, attention_logits, reference_points, valid_sizes)
    return _run(problem, check_kernel(kernel))


def _run(problem: Problem, kernel: KernelConfig) -> Tensor:
    backend = resolve(kernel, problem)
    deterministic = kernel.deterministic or torch.are_deterministic_algorithms_enabled()
    if backend != "reference":
        return attend(problem, backend, kernel.accumulator, deterministic)
    # grid_sample's backward on CUDA adds in any order, and refuses to run under deterministic algorithms
    sampler = gather_sample if deterministic and problem.value.is_cuda else sample
    value, shapes, locations, weights, reference_points, valid_sizes = problem
    if reference_points is None:
        return ms_deform_attn_reference(value, shapes, locations, weights, sampler=sampler)
    return ms_deform_attn_fused_reference(
        value, shapes, reference_points, locations, weights, valid_sizes, sampler=sampler
    )
