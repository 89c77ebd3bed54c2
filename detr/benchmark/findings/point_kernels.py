"""The experiments in CUDA: gather points forward, add points backward, with techniques that can be switched on.

Sources in csrc/. They are no part of `ops`, since none of them beats what it ships; they compile through its NVRTC path
and are launched by its launcher.
"""

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.msda.cuda.compiler import Sources, compile_kernel, nearest_architecture
from ops.msda.cuda.launch import Kernel, PreparedLaunch, device_limits, launch, load_kernel, pack_numbers
from ops.msda.cuda.plan import C_TYPES
from ops.msda.problem import Problem
from ops.msda.reference import SpatialShapes

D = 32
_ADD_THREADS, _GATHER_THREADS = 256, 512
# a query of 32-bit values has so many lanes, each 16 bytes wide
_ADD_LANES = 8


@dataclass(frozen=True)
class Technique:
    """What is switched on, nothing by default.

    Attributes:
        head_major: Values and gradients are (N, M, S, D), so that a row's right neighbour follows it; (N, S, M, D)
            otherwise.
        pair: Two corners side by side are one access of twice the lanes; needs `head_major` to be contiguous.
        padded: Maps have a border of zeros in place of a question at each corner.
        staged: Gathering only: the coarsest levels are copied to shared memory first.
        staggered: Adding only: each query begins with another point, against queries that add to the same place.
        swap: Adding only: a compare-and-swap loop in place of the hardware's reduction.
    """

    head_major: bool = False
    pair: bool = False
    padded: bool = False
    staged: bool = False
    staggered: bool = False
    swap: bool = False

    def __post_init__(self) -> None:
        if self.pair and not self.head_major:
            raise ValueError("pair=True needs head_major=True: otherwise the pair's rows lie M rows apart")

    @property
    def name(self) -> str:
        return " + ".join(field.name for field in fields(self) if getattr(self, field.name)) or "plain"


@cache
def experiment_sources() -> Sources:
    """(name, text) of every header in csrc/."""
    folder = resources.files("detr.benchmark.findings") / "csrc"
    return tuple((file.name, file.read_text()) for file in sorted(folder.iterdir(), key=lambda file: file.name))


def gather_instance(dtype: torch.dtype, technique: Technique) -> str:
    """The template instance of a forward kernel."""
    flags = (technique.head_major, technique.pair, technique.padded, technique.staged)
    return f"findings::gather_points<{C_TYPES[dtype]}, {_spell(flags)}>"


def add_instance(dtype: torch.dtype, sum_dtype: torch.dtype, technique: Technique) -> str:
    """The template instance of a backward kernel."""
    flags = (technique.swap, technique.head_major, technique.pair, technique.padded, technique.staggered)
    return f"findings::add_points<{C_TYPES[dtype]}, {C_TYPES[sum_dtype]}, {_spell(flags)}>"


def laid_out(value: Tensor, spatial_shapes: SpatialShapes, technique: Technique) -> Tensor:
    """Values (N, S, M, D) in the layout of a technique, contiguous; the same tensor if it has that layout."""
    if technique.padded:
        levels = value.split([H * W for H, W in spatial_shapes], dim=1)
        bordered = [
            F.pad(level.unflatten(1, (H, W)), (0, 0, 0, 0, 1, 1, 1, 1)).flatten(1, 2)
            for level, (H, W) in zip(levels, spatial_shapes, strict=True)
        ]
        value = torch.cat(bordered, dim=1)  # (N, sum((H + 2) * (W + 2)), M, D)
    if technique.head_major:
        value = value.transpose(1, 2)  # (N, M, S, D)
    return value.contiguous()


def taken_back(laid: Tensor, spatial_shapes: SpatialShapes, technique: Technique) -> Tensor:
    """The inverse of `laid_out`: (N, S, M, D), a border left out."""
    if technique.head_major:
        laid = laid.transpose(1, 2)
    if technique.padded:
        levels = laid.split([(H + 2) * (W + 2) for H, W in spatial_shapes], dim=1)
        inner = [
            level.unflatten(1, (H + 2, W + 2))[:, 1:-1, 1:-1].flatten(1, 2)
            for level, (H, W) in zip(levels, spatial_shapes, strict=True)
        ]
        laid = torch.cat(inner, dim=1)
    return laid.contiguous()


def first_staged_level(spatial_shapes: SpatialShapes, *, border: int, cell_bytes: int, max_bytes: int) -> int:
    """The first of the last levels that fit into shared memory together; L if not even the last does.

    Args:
        border: Cells that padding adds to each side of a map, both ends together.
    """
    level, used = len(spatial_shapes), 0
    while level > 0:
        H, W = spatial_shapes[level - 1]
        used += (H + border) * (W + border) * cell_bytes
        if used > max_bytes:
            break
        level -= 1
    return level


class GatherPoints:
    """The forward experiment on one problem with locations and weights, D = 32.

    Args:
        problem: On a CUDA device; value and weights of one dtype, locations float32.
        technique: What is switched on.
    """

    def __init__(self, problem: Problem, technique: Technique) -> None:
        _check(problem)
        self._problem, self._technique = problem, technique
        value, shapes, _, weights, *_ = problem
        N, _, M, _ = value.shape
        self.laid = laid_out(value, shapes, technique)
        self.output = value.new_empty((N, problem.Lq, M * D))
        index = value.device.index
        limits = device_limits(index)
        border = 2 if technique.padded else 0
        row_bytes = D * value.element_size()
        first, staged_cells, shared = len(shapes), 0, 0
        if technique.staged:
            # two blocks a multiprocessor
            room = limits.max_shared // 2 - 2048
            first = first_staged_level(shapes, border=border, cell_bytes=row_bytes, max_bytes=room)
            staged_cells = sum((H + border) * (W + border) for H, W in shapes[first:])
            shared = staged_cells * row_bytes
        # two waves of blocks, so that what is staged is used often
        num_chunks = max(1, -(-2 * limits.multiprocessors // (N * M)))
        chunk = -(-problem.Lq // num_chunks)
        num_cells = self.laid.shape[2 if technique.head_major else 1]
        numbers = (N, num_cells, M, problem.Lq, chunk, num_chunks, len(shapes), weights.shape[4], first, staged_cells)
        self._launch = _prepare(
            gather_instance(value.dtype, technique), index, N * M * num_chunks, _GATHER_THREADS, shared, numbers, shapes
        )

    def lay_out(self) -> Tensor:
        """Bring the values into the layout of the technique, as every forward pass would have to."""
        return laid_out(self._problem.value, self._problem.spatial_shapes, self._technique)

    def __call__(self) -> Tensor:
        """(N, Lq, M * D), the same buffer at every call."""
        problem = self._problem
        inputs = (self.laid.data_ptr(), problem.locations.data_ptr(), problem.weights.data_ptr(), 0, 0)
        launch(self._launch, [*inputs, self.output.data_ptr(), *(0,) * 6])
        return self.output


class AddPoints:
    """The backward experiment on one problem: the value gradient alone, by global atomics.

    Args:
        problem: See `GatherPoints`.
        grad_output: (N, Lq, M * D) of the dtype of value.
        technique: What is switched on.
        sum_dtype: What is added up in.
    """

    def __init__(self, problem: Problem, grad_output: Tensor, technique: Technique, sum_dtype: torch.dtype) -> None:
        _check(problem)
        self._problem, self._grad_output, self._technique = problem, grad_output.contiguous(), technique
        value, shapes, _, weights, *_ = problem
        N, _, M, _ = value.shape
        border = 2 if technique.padded else 0
        num_cells = sum((H + border) * (W + border) for H, W in shapes)
        shape = (N, M, num_cells, D) if technique.head_major else (N, num_cells, M, D)
        self.sums = torch.zeros(shape, dtype=sum_dtype, device=value.device)
        chunk = _ADD_THREADS // (_ADD_LANES * (2 if technique.pair else 1))
        num_chunks = -(-problem.Lq // chunk)
        numbers = (N, num_cells, M, problem.Lq, chunk, num_chunks, len(shapes), weights.shape[4], 0, 0)
        instance = add_instance(value.dtype, sum_dtype, technique)
        self._launch = _prepare(instance, value.device.index, N * M * num_chunks, _ADD_THREADS, 0, numbers, shapes)

    def add(self) -> None:
        """Clear the sums and add, as every backward pass has to."""
        self.sums.zero_()
        problem = self._problem
        inputs = (0, problem.locations.data_ptr(), problem.weights.data_ptr(), 0, 0, 0)
        launch(self._launch, [*inputs, self._grad_output.data_ptr(), self.sums.data_ptr(), *(0,) * 4])

    def take_back(self) -> Tensor:
        """(N, S, M, D) of the dtype of value, from the sums."""
        laid = taken_back(self.sums, self._problem.spatial_shapes, self._technique)
        return laid.to(self._problem.value.dtype)

    def __call__(self) -> Tensor:
        self.add()
        return self.take_back()


def _check(problem: Problem) -> None:
    value, _, locations, weights, reference_points, _ = problem
    if reference_points is not None or value.shape[3] != D or locations.dtype != torch.float32:
        raise ValueError(
            f"the experiments take float32 locations and D = {D}; got {locations.dtype}, value of shape "
            f"{tuple(value.shape)} and {'the fused form' if reference_points is not None else 'locations'}"
        )
    if value.device.type != "cuda" or weights.dtype != value.dtype:
        raise ValueError(f"value and weights must be of one dtype on a GPU; got {value.dtype} and {weights.dtype}")
    if not (value.is_contiguous() and locations.is_contiguous() and weights.is_contiguous()):
        raise ValueError("the experiments read contiguous tensors; call .contiguous() first")


def _prepare(
    instance: str,
    device_index: int,
    num_blocks: int,
    threads: int,
    shared: int,
    numbers: tuple[int, ...],
    shapes: SpatialShapes,
) -> PreparedLaunch:
    sizes = [side for pair in shapes for side in pair]
    return PreparedLaunch(
        _kernel(instance, device_index), device_index, num_blocks, threads, shared, pack_numbers(numbers, sizes)
    )


@cache
def _kernel(instance: str, device_index: int) -> Kernel:
    architecture = nearest_architecture(*torch.cuda.get_device_capability(device_index))
    compiled = compile_kernel(instance, architecture, extra_sources=experiment_sources())
    with torch.cuda.device(device_index):
        return load_kernel(instance, compiled, device_index)


def _spell(flags: tuple[bool, ...]) -> str:
    return ", ".join("true" if flag else "false" for flag in flags)
