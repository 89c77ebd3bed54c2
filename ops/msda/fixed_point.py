"""64-bit fixed point for the deterministic value gradient: the same sum in any order."""

import torch
from torch import Tensor

from ops.msda.problem import Problem


def fixed_point_scale(problem: Problem, grad_output: Tensor) -> Tensor:
    """The power of two that brings any sum of value gradients just under 2^62, as a float32 scalar on the device.

    A cell gets at most Lq * P addends of one level, none larger than max |grad_output| * max |weight|. NaN if a
    gradient is not finite, so that the whole value gradient becomes NaN and loss scaling notices.
    """
    bound = _largest(grad_output).double() * (problem.Lq * problem.locations.shape[4])
    if problem.reference_points is None:
        bound = bound * _largest(problem.weights)
    scale = torch.exp2(torch.floor(61 - torch.log2(bound))).clamp(max=2.0**120)
    return torch.where(torch.isfinite(bound), scale, torch.nan).float()


def from_fixed_point(sums: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 sums back to float32, exact but for that since the scale is a power of two, and on to `dtype`."""
    output = torch.empty_like(sums, dtype=dtype)
    return torch.mul(sums, scale.reciprocal(), out=output)


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, without a copy of the tensor; NaN if one is in it."""
    return torch.linalg.vector_norm(tensor, ord=torch.inf, dtype=torch.float32)
