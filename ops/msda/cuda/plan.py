"""Which kernel instances run a problem, and how they are cut into blocks. Pure arithmetic: no GPU needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.msda.config import Accumulator

C_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
MAX_LEVELS = 16

_VECTOR_BYTES = 16
_LINE_BYTES = 128
_MIN_LANES, _MAX_LANES = 4, 32
# scatter32: a tile of this many pixels of the finest level, with its share of the others, makes a block
_TILE_PX = 14
_SCATTER_WARPS = 16
_SCATTER_WARP_BYTES = 2048
# (query, head) pairs a multiprocessor below which a problem counts as small, such as a decoder's
_SMALL_QUERIES_PER_MULTIPROCESSOR = 256
# LevelTable, windows and statistics of the kernel
_SCATTER_STATIC_BYTES = 4608
_CELL_BYTES = 128


@dataclass(frozen=True)
class Signature:
    """What a kernel is compiled for.

    Attributes:
        value, locations, weights: Dtypes; offsets and logits in the fused form.
        form: 0 for locations and weights, 2 for offsets around points, 4 for offsets in boxes.
        P, D: Points a level, channels a head.
    """

    value: torch.dtype
    locations: torch.dtype
    weights: torch.dtype
    form: int
    P: int
    D: int


@dataclass(frozen=True)
class Launch:
    """One kernel and its grid.

    Attributes:
        instance: The template instance, as C++ spells it.
        heads: Neighbouring heads a block takes.
        chunk: Queries a block takes; unused with tiles.
        num_chunks: Blocks for the heads of one block and one image.
        warps: Warps a block.
        dynamic_shared: Bytes.
        tiles: (columns, rows) of tiles in place of chunks; (0, 0) for chunks.
        max_cells: Cells of value gradient that fit in shared memory.
    """

    instance: str
    heads: int
    chunk: int
    num_chunks: int
    warps: int
    dynamic_shared: int = 0
    tiles: tuple[int, int] = (0, 0)
    max_cells: int = 0


@dataclass(frozen=True)
class Geometry:
    """How the lanes of a warp share the channels of a head.

    Attributes:
        vector: Neighbouring channels a lane reads in one access.
        lanes: Lanes a (query, head), a power of two. Lanes past the channels idle; channels past the lanes take
            another round.
    """

    vector: int
    lanes: int


def geometry(dtype: torch.dtype, D: int) -> Geometry:
    """The widest aligned access that still leaves at least four lanes a head."""
    vector = _VECTOR_BYTES // dtype.itemsize
    while vector > 1 and (D % vector or D // vector < _MIN_LANES):
        vector //= 2
    lanes = _MIN_LANES
    while lanes * vector < D and lanes < _MAX_LANES:
        lanes *= 2
    return Geometry(vector, lanes)


def forward_launch(
    signature: Signature,
    M: int,
    Lq: int,
    *,
    warps: int = 4,
    unroll: int | None = None,
    min_blocks: int | None = None,
) -> Launch:
    """The forward pass, any shape.

    Args:
        warps: A block.
        unroll: Points in flight; None for what was fastest for the dtype.
        min_blocks: Blocks a multiprocessor, which bounds the registers; None likewise.
    """
    is_wide = signature.value == torch.float32
    unroll = unroll or (4 if is_wide else 2)
    min_blocks = min_blocks or (8 if is_wide else 9)
    shape = geometry(signature.value, signature.D)
    heads = _heads_together(signature, M, 32 // shape.lanes)
    chunk = warps * (32 // shape.lanes) // heads
    numbers = (signature.form, signature.P, signature.D, shape.vector, shape.lanes)
    instance = _instance("forward", _c_types(signature), *numbers, heads, warps, unroll, min_blocks)
    return Launch(instance, heads, chunk, -(-Lq // chunk), warps)


def backward_launches(
    signature: Signature,
    M: int,
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    N: int,
    needs: tuple[bool, bool, bool, bool],
    accumulator: Accumulator,
    deterministic: bool,
    multiprocessors: int,
    max_shared: int,
) -> tuple[Launch, ...]:
    """The kernels of a backward pass, in order.

    Args:
        needs: Which gradients are wanted: value, locations, weights, reference points.
        multiprocessors, max_shared: Of the device; the latter is what a block may opt into, in bytes.
    """
    L = len(spatial_shapes)
    special = signature.D == 32 and signature.P % 4 == 0 and L * signature.P <= 128
    sums = "fixed" if deterministic else accumulator
    # too few queries to fill the GPU: what counts is one launch instead of two
    is_small = N * M * Lq < multiprocessors * _SMALL_QUERIES_PER_MULTIPROCESSOR
    if not special or is_small:
        return (_backward(signature, L, Lq, needs[3], sums),)
    launches = []
    if any(needs[1:]):
        launches.append(dots32_launch(signature, M, Lq, L, needs[3]))
    if needs[0]:
        launches.append(scatter32_launch(signature, M, Lq, spatial_shapes, N, sums, multiprocessors, max_shared))
    return tuple(launches)


def dots32_launch(
    signature: Signature,
    M: int,
    Lq: int,
    L: int,
    with_reference_points: bool,
    *,
    warps: int = 4,
    min_blocks: int | None = None,
) -> Launch:
    """Gradients of locations and weights for D = 32."""
    min_blocks = min_blocks or (6 if signature.value == torch.float32 else 7)
    lanes = 8 if signature.value == torch.float32 else 4
    heads = _heads_together(signature, M, 32 // lanes)
    chunk = warps * (32 // lanes) // heads
    types = _c_types(signature)
    instance = _instance("dots32", types, signature.form, signature.P, heads, warps, min_blocks)
    shared = warps * _gradient_board_bytes(signature, L, with_reference_points, lanes)
    return Launch(instance, heads, chunk, -(-Lq // chunk), warps, shared)


def scatter32_launch(
    signature: Signature,
    M: int,
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    N: int,
    accumulator: str,
    multiprocessors: int,
    max_shared: int,
    *,
    warps: int = _SCATTER_WARPS,
    tile_px: int = _TILE_PX,
    min_blocks: int = 2,
) -> Launch:
    """The value gradient for D = 32: through windows in shared memory if there are blocks enough."""
    types = _c_types(signature, accumulator)
    tiles = _tiles(spatial_shapes, Lq, tile_px)
    chunk = tile_px * tile_px * 4 // 3 // 8 * 8
    num_chunks = tiles[0] * tiles[1] or -(-Lq // chunk)
    if N * M * num_chunks < multiprocessors:
        warps, chunk = 4, 32
        instance = _instance("scatter32", types, signature.form, signature.P, warps, 4)
        return Launch(instance, 1, chunk, -(-Lq // chunk), warps, warps * _SCATTER_WARP_BYTES)
    space = max_shared // min_blocks - _SCATTER_STATIC_BYTES - warps * _SCATTER_WARP_BYTES
    if min_blocks > 1:
        space -= 1024
    max_cells = space // _CELL_BYTES
    shared = warps * _SCATTER_WARP_BYTES + max_cells * _CELL_BYTES
    instance = _instance("scatter32", types, signature.form, signature.P, warps, min_blocks)
    return Launch(instance, 1, chunk, num_chunks, warps, shared, tiles, max_cells)


def _backward(signature: Signature, L: int, Lq: int, with_reference_points: bool, accumulator: str) -> Launch:
    """The general kernel: everything in one pass, also the deterministic one."""
    warps, unroll, min_blocks = 4, 2, 4
    shape = geometry(signature.value, signature.D)
    chunk = warps * 32 // shape.lanes
    numbers = (signature.form, signature.P, signature.D, shape.vector, shape.lanes)
    instance = _instance("backward", _c_types(signature, accumulator), *numbers, warps, unroll, min_blocks)
    shared = warps * _gradient_board_bytes(signature, L, with_reference_points, shape.lanes)
    return Launch(instance, 1, chunk, -(-Lq // chunk), warps, shared)


def _tiles(spatial_shapes: tuple[tuple[int, int], ...], Lq: int, tile_px: int) -> tuple[int, int]:
    """(columns, rows) of tiles, or (0, 0) unless the queries are the cells: as many queries as cells."""
    if Lq != sum(H * W for H, W in spatial_shapes):
        return 0, 0
    H, W = max(spatial_shapes, key=lambda side: side[0] * side[1])
    return -(-W // tile_px), -(-H // tile_px)


def _heads_together(signature: Signature, M: int, groups: int) -> int:
    """As many neighbouring heads as fill a line of the L1 (csrc/forward.cuh says why)."""
    heads = 1
    row_bytes = signature.D * signature.value.itemsize
    while heads * 2 * row_bytes <= _LINE_BYTES and M % (heads * 2) == 0 and heads * 2 <= groups:
        heads *= 2
    return heads


def _gradient_board_bytes(signature: Signature, num_levels: int, with_reference_points: bool, lanes: int) -> int:
    """Bytes a warp needs to keep the gradients of its samples (GradientBoard in csrc/gradients.cuh)."""
    if signature.form == 0:
        return 0
    samples = -(-num_levels * signature.P // lanes) * 32
    return samples * 4 * (3 if with_reference_points else 1)


def _c_types(signature: Signature, accumulator: str | None = None) -> tuple[str, ...]:
    types = [C_TYPES[signature.value], C_TYPES[signature.locations], C_TYPES[signature.weights]]
    if accumulator is not None:
        sums = {"native": C_TYPES[signature.value], "float32": "float", "fixed": "long long"}
        types.insert(1, sums[accumulator])
    return tuple(types)


def _instance(kernel: str, types: Sequence[str], *numbers: int) -> str:
    return f"msda::{kernel}<{', '.join((*types, *map(str, numbers)))}>"
