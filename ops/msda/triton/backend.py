"""The Triton backend. With TRITON_INTERPRET=1 set before Triton is imported, it runs on CPU tensors."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ops.msda.config import Accumulator
from ops.msda.fixed_point import fixed_point_scale, from_fixed_point
from ops.msda.problem import Gradients, Problem
from ops.msda.tuning.device import choice_of
from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import Direction, Sums, sums_of

RUNS_ON = "any GPU Triton compiles for; float32, float16, bfloat16"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_LEVELS = 8
_MAX_POINTS = 256
# the interpreter's cost is a program's, not an element's
_INTERPRETED = LaunchShape("triton", warps=1, queries=256)


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Why the backend cannot run on this machine, or on a device of it; None if it can."""
    if device is None:
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if not torch.cuda.is_available() and not _interpreted():
            return "no GPU is visible to torch"
        return None
    if device.type != "cuda" and not _interpreted():
        return f"the tensors are on {device}: move them to a CUDA device"
    return None


def unsupported_reason(dtypes: tuple[tuple[str, torch.dtype], ...], num_levels: int) -> str | None:
    """Why the kernels cannot run tensors of these names and dtypes, or None if they can."""
    for name, dtype in dtypes:
        if dtype not in _DTYPES:
            return f"{name} is {dtype}, and the kernels run float32, float16 and bfloat16"
    if num_levels > _MAX_LEVELS:
        return f"there are {num_levels} levels, and the kernels hold {_MAX_LEVELS}"
    return None


def forward(problem: Problem, launch_shapes: tuple[LaunchShape, ...] | None = None) -> Tensor:
    """(N, Lq, M * D) in the dtype of value; None takes the launch shape of the device's table."""
    from ops.msda.triton.forward import _msda_forward_kernel

    N, _, M, D = problem.value.shape
    output = problem.value.new_empty((N, problem.Lq, M * D))
    if output.numel() > 0:
        problem = _contiguous(problem)
        launch_shape = launch_shapes[0] if launch_shapes else _tabled(problem, "forward", None)
        _launch(_msda_forward_kernel, problem, (*_inputs(problem), output), {}, launch_shape)
    return output


def backward(
    problem: Problem,
    grad_output: Tensor,
    needs: tuple[bool, bool, bool, bool],
    accumulator: Accumulator,
    deterministic: bool,
    launch_shapes: tuple[LaunchShape, ...] | None = None,
) -> Gradients:
    """Gradients of value, locations, weights and reference points, each only if its flag in `needs` is set.

    `launch_shapes` None takes that of the device's table.
    """
    from ops.msda.triton.backward import _msda_backward_kernel

    value = problem.value
    problem = _contiguous(problem)
    grad_output = grad_output.contiguous()
    N, S, M, D = value.shape
    sum_dtype = torch.float32 if accumulator == "float32" else value.dtype
    if deterministic:
        sum_dtype = torch.int64
    sums = value.new_zeros((N, S, M, D), dtype=sum_dtype) if needs[0] else None
    grad_locations = torch.empty_like(problem.locations) if needs[1] else None
    grad_weights = torch.empty_like(problem.weights) if needs[2] else None
    per_head = None
    if needs[3] and problem.reference_points is not None:
        shape = (N, problem.Lq, M, len(problem.spatial_shapes), problem.reference_points.shape[-1])
        per_head = value.new_empty(shape, dtype=torch.float32)
    scale = fixed_point_scale(problem, grad_output) if deterministic and needs[0] else None

    if grad_output.numel() > 0:
        # a pointer that is not used still needs a tensor
        outputs = (sums, grad_locations, grad_weights, per_head)
        pointers = [grad_output if tensor is None else tensor for tensor in (scale, *outputs)]
        flags = {
            "NEEDS_VALUE": needs[0],
            "NEEDS_LOCATIONS": needs[1],
            "NEEDS_WEIGHTS": needs[2],
            "NEEDS_REFERENCE": per_head is not None,
            "FIXED": scale is not None,
        }
        tensors = (grad_output, *_inputs(problem), *pointers)
        kind = sums_of(value.dtype, accumulator, deterministic)
        launch_shape = launch_shapes[0] if launch_shapes else _tabled(problem, "backward", kind)
        _launch(_msda_backward_kernel, problem, tensors, flags, launch_shape)

    grad_value = sums
    if sums is not None:
        grad_value = sums.to(value.dtype) if scale is None else from_fixed_point(sums, scale, value.dtype)
    grad_reference_points = None
    if per_head is not None and problem.reference_points is not None:
        grad_reference_points = per_head.sum(2)
    return Gradients(grad_value, grad_locations, grad_weights, grad_reference_points)


def _launch(
    kernel: Any,
    problem: Problem,
    tensors: tuple[Tensor, ...],
    flags: dict[str, bool],
    launch_shape: LaunchShape,
) -> None:
    import triton

    N, S, M, D = problem.value.shape
    L, P = len(problem.spatial_shapes), problem.locations.shape[4]
    sides = [side for pair in problem.spatial_shapes for side in pair]
    sides += [0] * (2 * _MAX_LEVELS - len(sides))
    grid = (triton.cdiv(problem.Lq, launch_shape.queries), M, N)
    arguments = (*tensors, S, problem.Lq, M, *sides)
    constants = {
        "D": D,
        "L": L,
        "P": P,
        "FORM": 0 if problem.reference_points is None else problem.reference_points.shape[-1],
        "HAS_VALID": problem.valid_sizes is not None,
        "BLOCK_Q": launch_shape.queries,
        "BLOCK_D": triton.next_power_of_2(D),
        "BLOCK_LP": triton.next_power_of_2(L * P),
        **flags,
    }
    if problem.value.is_cuda and torch.cuda.current_device() != problem.value.device.index:
        with torch.cuda.device(problem.value.device):
            kernel[grid](*arguments, **constants, num_warps=launch_shape.warps)
    else:
        kernel[grid](*arguments, **constants, num_warps=launch_shape.warps)


def _tabled(problem: Problem, direction: Direction, sums: Sums | None) -> LaunchShape:
    """What the table of the device has for a problem."""
    if _interpreted() or problem.value.device.index is None:
        return _INTERPRETED
    return choice_of(problem, direction, sums).triton


def _inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value, _, locations, weights, reference_points, valid_sizes = problem
    # a pointer that is not used still needs a tensor
    return (
        value,
        locations,
        weights,
        value if reference_points is None else reference_points,
        value if valid_sizes is None else valid_sizes,
    )


def _contiguous(problem: Problem) -> Problem:
    reference_points, valid_sizes = problem.reference_points, problem.valid_sizes
    return Problem(
        problem.value.contiguous(),
        problem.spatial_shapes,
        problem.locations.contiguous(),
        problem.weights.contiguous(),
        None if reference_points is None else reference_points.float().contiguous(),
        None if valid_sizes is None else valid_sizes.to(torch.int32).contiguous(),
    )


def _interpreted() -> bool:
    """Whether Triton runs its kernels as Python, which it decides when they are defined."""
    if find_spec("triton") is None:
        return False
    from triton.runtime.interpreter import InterpretedFunction

    from ops.msda.triton.forward import _msda_forward_kernel

    return isinstance(_msda_forward_kernel, InterpretedFunction)
