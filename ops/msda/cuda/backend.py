"""The CUDA backend: kernels compiled with NVRTC, launched through the driver."""

from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ops.msda.config import Accumulator
from ops.msda.cuda.compiler import compile_kernel, nearest_architecture
from ops.msda.cuda.launch import Kernel, PreparedLaunch, device_limits, launch, load_kernel, pack_numbers
from ops.msda.cuda.plan import C_TYPES, MAX_LEVELS, Launch, Maps, Signature, backward_launches, forward_launch
from ops.msda.fixed_point import fixed_point_scale, from_fixed_point
from ops.msda.problem import Gradients, Problem
from ops.msda.tuning.device import device_tuning
from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import Direction, Sums, shape_class, sums_of

RUNS_ON = "NVIDIA GPUs from compute capability 8.0, compiled on first use; float32, float16, bfloat16"
_MIN_CAPABILITY = (8, 0)


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Why the backend cannot run on this machine, or on a device of it; None if it can."""
    if device is None:
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return "the package cuda-bindings is not installed (torch's CUDA wheels bring it)"
        if torch.version.hip is not None or not torch.cuda.is_available():
            return "no NVIDIA GPU is visible to torch"
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}: move them to a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, and 8.0 is the least"
    return None


def unsupported_reason(dtypes: tuple[tuple[str, torch.dtype], ...], num_levels: int) -> str | None:
    """Why the kernels cannot run tensors of these names and dtypes, or None if they can."""
    for name, dtype in dtypes:
        if dtype not in C_TYPES:
            return f"{name} is {dtype}, and the kernels run float32, float16 and bfloat16"
    if num_levels > MAX_LEVELS:
        return f"there are {num_levels} levels, and the kernels hold {MAX_LEVELS}"
    return None


def forward(problem: Problem, launch_shapes: tuple[LaunchShape, ...] | None = None) -> Tensor:
    """(N, Lq, M * D) in the dtype of value; None takes the launch shapes of the device's table."""
    value = problem.value
    N, _, M, D = value.shape
    output = value.new_empty((N, problem.Lq, M * D))
    if output.numel() > 0:
        problem = _prepared(problem)
        prepared = _forward_launch(
            _signature(problem), value.shape, problem.Lq, problem.spatial_shapes, value.device.index, launch_shapes
        )
        _run((prepared,), [*_input_pointers(problem), output.data_ptr(), 0, 0, 0, 0, 0, 0])
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

    `launch_shapes` None takes those of the device's table.
    """
    value = problem.value
    problem = _prepared(problem)
    grad_output = _aligned(grad_output)
    signature = _signature(problem)
    N, S, M, D = value.shape
    kind = sums_of(value.dtype, accumulator, deterministic)
    sum_dtype = {"float32": torch.float32, "native": value.dtype, "fixed": torch.int64}[kind]
    grad_locations = torch.empty_like(problem.locations) if needs[1] else None
    grad_weights = torch.empty_like(problem.weights) if needs[2] else None
    per_head = None
    if needs[3]:
        shape = (N, problem.Lq, M, len(problem.spatial_shapes), signature.form)
        per_head = value.new_empty(shape, dtype=torch.float32)

    launches: tuple[PreparedLaunch, ...] = ()
    writes_value = False
    if grad_output.numel() > 0:
        launches, writes_value = _backward_launches(
            signature,
            value.shape,
            problem.Lq,
            problem.spatial_shapes,
            value.device.index,
            needs,
            kind,
            launch_shapes,
        )
    sums = scale = None
    if needs[0] and writes_value:
        sums = value.new_empty((N, S, M, D))
    elif needs[0]:
        sums = value.new_zeros((N, S, M, D), dtype=sum_dtype)
        scale = fixed_point_scale(problem, grad_output) if deterministic else None
    if launches:
        outputs = (sums, grad_locations, grad_weights, per_head, scale)
        output_pointers = [0 if tensor is None else tensor.data_ptr() for tensor in outputs]
        _run(launches, [*_input_pointers(problem), 0, grad_output.data_ptr(), *output_pointers])

    grad_value = sums
    if sums is not None:
        grad_value = sums.to(value.dtype) if scale is None else from_fixed_point(sums, scale, value.dtype)
    grad_reference_points = None
    if per_head is not None and problem.reference_points is not None:
        grad_reference_points = per_head.sum(2)
    return Gradients(grad_value, grad_locations, grad_weights, grad_reference_points)


def prepare(
    plan: Launch,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    device_index: int,
) -> PreparedLaunch:
    """Compile or find the kernel of a plan, and pack what does not change from call to call."""
    N, S, M, _ = value_shape
    numbers = (N, S, M, Lq, plan.chunk, plan.num_chunks, len(spatial_shapes), *plan.tiles, plan.max_cells)
    sizes = [side for pair in spatial_shapes for side in pair]
    return PreparedLaunch(
        _kernel(plan.instance, device_index),
        device_index,
        N * (M // plan.heads) * plan.num_chunks,
        plan.warps * 32,
        plan.dynamic_shared,
        pack_numbers(numbers, sizes),
    )


@lru_cache(maxsize=1024)
def _forward_launch(
    signature: Signature,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    device_index: int,
    launch_shapes: tuple[LaunchShape, ...] | None,
) -> PreparedLaunch:
    if launch_shapes is None:
        launch_shapes = _tabled("forward", signature, value_shape, Lq, spatial_shapes, device_index, None)
    maps = Maps(spatial_shapes, value_shape[0], device_limits(device_index).multiprocessors)
    plan = forward_launch(signature, value_shape[2], Lq, launch_shapes[0], maps)
    return prepare(plan, value_shape, Lq, spatial_shapes, device_index)


@lru_cache(maxsize=1024)
def _backward_launches(
    signature: Signature,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    device_index: int,
    needs: tuple[bool, bool, bool, bool],
    sums: Sums,
    launch_shapes: tuple[LaunchShape, ...] | None,
) -> tuple[tuple[PreparedLaunch, ...], bool]:
    """The launches, and whether they write the value gradient instead of adding to zeros."""
    if launch_shapes is None:
        launch_shapes = _tabled("backward", signature, value_shape, Lq, spatial_shapes, device_index, sums)
    limits = device_limits(device_index)
    maps = Maps(spatial_shapes, value_shape[0], limits.multiprocessors)
    plans = backward_launches(
        signature, value_shape[2], Lq, spatial_shapes, needs, sums, launch_shapes, limits.max_shared, maps
    )
    prepared = tuple(prepare(plan, value_shape, Lq, spatial_shapes, device_index) for plan in plans)
    return prepared, any(plan.writes_value for plan in plans)


def _tabled(
    direction: Direction,
    signature: Signature,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    device_index: int,
    sums: Sums | None,
) -> tuple[LaunchShape, ...]:
    """What the table of the device has for a problem."""
    multiprocessors = device_limits(device_index).multiprocessors
    kind = shape_class(direction, signature.value, value_shape, Lq, spatial_shapes, signature.P, sums, multiprocessors)
    return device_tuning(device_index).choice(kind).cuda


def _run(launches: tuple[PreparedLaunch, ...], pointers: list[int]) -> None:
    device_index = launches[0].device_index if launches else 0
    if torch.cuda.current_device() == device_index:
        for prepared in launches:
            launch(prepared, pointers)
    else:
        with torch.cuda.device(device_index):
            for prepared in launches:
                launch(prepared, pointers)


def _prepared(problem: Problem) -> Problem:
    """Contiguous and aligned, as the kernels read it."""
    reference_points = problem.reference_points
    if reference_points is not None:
        reference_points = _aligned(reference_points.float())
    valid_sizes = problem.valid_sizes
    if valid_sizes is not None:
        valid_sizes = valid_sizes.to(torch.int32).contiguous()
    return Problem(
        _aligned(problem.value),
        problem.spatial_shapes,
        _aligned(problem.locations),
        _aligned(problem.weights),
        reference_points,
        valid_sizes,
    )


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _signature(problem: Problem) -> Signature:
    form = 0 if problem.reference_points is None else problem.reference_points.shape[-1]
    return Signature(
        problem.value.dtype,
        problem.locations.dtype,
        problem.weights.dtype,
        form,
        problem.locations.shape[4],
        problem.value.shape[3],
    )


def _input_pointers(problem: Problem) -> tuple[int, int, int, int, int]:
    reference_points, valid_sizes = problem.reference_points, problem.valid_sizes
    return (
        problem.value.data_ptr(),
        problem.locations.data_ptr(),
        problem.weights.data_ptr(),
        0 if reference_points is None else reference_points.data_ptr(),
        0 if valid_sizes is None else valid_sizes.data_ptr(),
    )


@cache
def _kernel(instance: str, device_index: int) -> Kernel:
    compiled = compile_kernel(instance, nearest_architecture(*torch.cuda.get_device_capability(device_index)))
    with torch.cuda.device(device_index):
        return load_kernel(instance, compiled, device_index)
