"""From launch shapes to kernel instances and their grids. Pure arithmetic: no GPU needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import Sums

C_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
MAX_LEVELS = 16

_VECTOR_BYTES = 16
_LINE_BYTES = 128
_MIN_LANES, _MAX_LANES = 4, 32
# scatter32: WarpSpace; levels, windows and statistics; a cell of a window
_SCATTER_WARP_BYTES = 2048
_SCATTER_STATIC_BYTES = 4608
_CELL_BYTES = 128
# collect32: cells a block takes at most, least blocks a level, and what it keeps a corner of a sample
_COLLECT_CELLS = 4096
_COLLECT_PARTS = 1
_COLLECT_CORNER_BYTES = 8
_COLLECT_STATIC_BYTES = 1024
# a query in a block's list; Span; the list of a block that runs through tiles
_QUERY_BYTES = 4
_SPAN_BYTES = 20
_LIST_BYTES = 24 * 1024
# its partial statistics take the place of the cells, at most so many a warp
_MIN_CELLS_A_WARP = 5
# queries a block of scatter32 without windows
_DIRECT_CHUNK = 32
# taken of a multiprocessor's shared memory by every block after the first
_RESERVED_BYTES = 1024


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
        chunk: Queries a block takes, at most if it is a tile; tiles if it goes through several; cells in collect32.
        num_chunks: Blocks for the heads of one block and one image.
        warps: Warps a block.
        dynamic_shared: Bytes.
        tiles: (columns, rows) of tiles in place of chunks; (0, 0) for chunks.
        max_cells: Cells of value gradient that fit in shared memory; queries of a block that goes through tiles; least
            blocks a level in collect32.
        writes_value: Whether each row of the value gradient is written once in its dtype, instead of added to.
    """

    instance: str
    heads: int
    chunk: int
    num_chunks: int
    warps: int
    dynamic_shared: int = 0
    tiles: tuple[int, int] = (0, 0)
    max_cells: int = 0
    writes_value: bool = False


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


@dataclass(frozen=True)
class Maps:
    """What tiles are cut from, and how many blocks are wanted.

    Attributes:
        spatial_shapes: (H, W) a level.
        N: Images.
        multiprocessors: Of the device.
    """

    spatial_shapes: tuple[tuple[int, int], ...]
    N: int
    multiprocessors: int


def forward_launch(
    signature: Signature, M: int, Lq: int, launch_shape: LaunchShape, maps: Maps | None = None
) -> Launch:
    """The forward pass, any shape; tiles only if the launch shape has them and the maps are given."""
    warps = launch_shape.warps
    shape = geometry(signature.value, signature.D)
    heads = _heads_together(signature, M, 32 // shape.lanes)
    chunk = warps * (32 // shape.lanes) // heads
    run = _run_of_tiles(Lq, M // heads, launch_shape, maps)
    numbers = (signature.form, signature.P, signature.D, shape.vector, shape.lanes, heads, warps, launch_shape.unroll)
    instance = _instance("forward", _c_types(signature), *numbers, launch_shape.min_blocks, _flag(run is not None))
    if run is None:
        return Launch(instance, heads, chunk, -(-Lq // chunk), warps)
    return Launch(instance, heads, run.tiles, run.num_blocks, warps, run.list_bytes, run.grid, run.capacity)


def backward_launches(
    signature: Signature,
    M: int,
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    needs: tuple[bool, bool, bool, bool],
    sums: Sums,
    launch_shapes: tuple[LaunchShape, ...],
    max_shared: int,
    maps: Maps | None = None,
) -> tuple[Launch, ...]:
    """The kernels of a backward pass, in order.

    Args:
        needs: Which gradients are wanted: value, locations, weights, reference points.
        sums: What value gradients are summed in.
        launch_shapes: `Choice.cuda` of the shape class.
        max_shared: What a block may opt into on the device, in bytes.

    Raises:
        ValueError: A launch shape needs more shared memory than the device has.
    """
    L = len(spatial_shapes)
    launches: list[Launch] = []
    for shape in launch_shapes:
        if shape.kernel == "backward":
            launches.append(general_launch(signature, L, Lq, needs[3], sums, shape))
        elif shape.kernel == "dots32" and any(needs[1:]):
            launches.append(dots32_launch(signature, M, Lq, L, needs[3], shape, maps))
        elif shape.kernel == "collect32" and needs[0]:
            launches += collect32_launches(signature, Lq, spatial_shapes, shape, max_shared)
        elif shape.kernel == "scatter32" and needs[0] and not any(launch.writes_value for launch in launches):
            launches.append(scatter32_launch(signature, Lq, spatial_shapes, sums, shape, max_shared))
    return tuple(launches)


def dots32_launch(
    signature: Signature,
    M: int,
    Lq: int,
    L: int,
    with_reference_points: bool,
    launch_shape: LaunchShape,
    maps: Maps | None = None,
) -> Launch:
    """Gradients of locations and weights for D = 32."""
    warps = launch_shape.warps
    lanes = 8 if signature.value == torch.float32 else 4
    heads = _heads_together(signature, M, 32 // lanes)
    chunk = warps * (32 // lanes) // heads
    run = _run_of_tiles(Lq, M // heads, launch_shape, maps)
    numbers = (signature.form, signature.P, heads, warps, launch_shape.min_blocks)
    instance = _instance("dots32", _c_types(signature), *numbers, _flag(run is not None))
    shared = warps * _gradient_board_bytes(signature, L, with_reference_points, lanes)
    if run is None:
        return Launch(instance, heads, chunk, -(-Lq // chunk), warps, shared)
    return Launch(instance, heads, run.tiles, run.num_blocks, warps, shared + run.list_bytes, run.grid, run.capacity)


def scatter32_launch(
    signature: Signature,
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    sums: Sums,
    launch_shape: LaunchShape,
    max_shared: int,
) -> Launch:
    """The value gradient for D = 32: through windows in shared memory if the launch shape has tiles."""
    warps, tile_px, min_blocks = launch_shape.warps, launch_shape.tile_px, launch_shape.min_blocks
    instance = _instance("scatter32", _c_types(signature, sums), signature.form, signature.P, warps, min_blocks)
    warp_bytes = warps * _SCATTER_WARP_BYTES
    if tile_px == 0:
        shared = warp_bytes + _DIRECT_CHUNK * _QUERY_BYTES
        return Launch(instance, 1, _DIRECT_CHUNK, -(-Lq // _DIRECT_CHUNK), warps, shared)
    tiles, chunk = _tiles(spatial_shapes, Lq, tile_px)
    # as many queries as a tile has on four levels
    chunk = chunk or max(tile_px * tile_px * 4 // 3 // 8 * 8, 8)
    num_chunks = tiles[0] * tiles[1] or -(-Lq // chunk)
    fixed_bytes = warp_bytes + chunk * _QUERY_BYTES
    max_cells = (_space(max_shared, min_blocks) - _SCATTER_STATIC_BYTES - fixed_bytes) // _CELL_BYTES
    _require_cells(max_cells, launch_shape, max_shared)
    shared = fixed_bytes + max_cells * _CELL_BYTES
    return Launch(instance, 1, chunk, num_chunks, warps, shared, tiles, max_cells)


def collect32_launches(
    signature: Signature,
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    launch_shape: LaunchShape,
    max_shared: int,
) -> list[Launch]:
    """The value gradient for D = 32, each row written once; none if a block cannot hold the corners of all samples."""
    shared = 4 * Lq * signature.P * _COLLECT_CORNER_BYTES + _COLLECT_CELLS * 4
    if shared > max_shared - _COLLECT_STATIC_BYTES:
        return []
    warps, min_blocks = launch_shape.warps, launch_shape.min_blocks
    instance = _instance("collect32", _c_types(signature), signature.form, signature.P, warps, min_blocks)
    num_chunks = sum(max(-(-H * W // _COLLECT_CELLS), min(_COLLECT_PARTS, H * W)) for H, W in spatial_shapes)
    return [Launch(instance, 1, _COLLECT_CELLS, num_chunks, warps, shared, max_cells=_COLLECT_PARTS, writes_value=True)]


def general_launch(
    signature: Signature, L: int, Lq: int, with_reference_points: bool, sums: Sums, launch_shape: LaunchShape
) -> Launch:
    """Everything in one pass, any D."""
    warps = launch_shape.warps
    shape = geometry(signature.value, signature.D)
    chunk = warps * 32 // shape.lanes
    numbers = (signature.form, signature.P, signature.D, shape.vector, shape.lanes, warps)
    types = _c_types(signature, sums)
    instance = _instance("backward", types, *numbers, launch_shape.unroll, launch_shape.min_blocks)
    shared = warps * _gradient_board_bytes(signature, L, with_reference_points, shape.lanes)
    return Launch(instance, 1, chunk, -(-Lq // chunk), warps, shared)


def _tiles(spatial_shapes: tuple[tuple[int, int], ...], Lq: int, tile_px: int) -> tuple[tuple[int, int], int]:
    """(columns, rows) of tiles, and the queries of the largest.

    ((0, 0), 0) unless the queries are the cells: as many queries as cells.
    """
    if Lq != sum(H * W for H, W in spatial_shapes):
        return (0, 0), 0
    H, W = max(spatial_shapes, key=lambda side: side[0] * side[1])
    columns, rows = -(-W // tile_px), -(-H // tile_px)
    return (columns, rows), sum(-(-W // columns) * -(-H // rows) for H, W in spatial_shapes)


@dataclass(frozen=True)
class _Run:
    """Tiles one after the other in a block.

    Attributes:
        grid: (columns, rows) of tiles.
        tiles: A block.
        num_blocks: For the heads of one block and one image.
        capacity: Queries a block, at most.
        list_bytes: Of the list of them and what it is made with.
    """

    grid: tuple[int, int]
    tiles: int
    num_blocks: int
    capacity: int
    list_bytes: int


def _run_of_tiles(Lq: int, head_groups: int, launch_shape: LaunchShape, maps: Maps | None) -> _Run | None:
    """As many blocks as run at a time, or a multiple where their lists would be too long; None without tiles."""
    if maps is None or launch_shape.tile_px == 0:
        return None
    grid, largest = _tiles(maps.spatial_shapes, Lq, launch_shape.tile_px)
    num_tiles, at_a_time = grid[0] * grid[1], maps.multiprocessors * launch_shape.min_blocks
    if num_tiles == 0:
        return None
    for waves in range(1, num_tiles + 1):
        tiles = -(-num_tiles // max(at_a_time * waves // (maps.N * head_groups), 1))
        capacity = tiles * largest
        list_bytes = 4 * (capacity + tiles + 1) + _SPAN_BYTES * tiles * len(maps.spatial_shapes)
        if list_bytes <= _LIST_BYTES or tiles == 1:
            return _Run(grid, tiles, -(-num_tiles // tiles), capacity, list_bytes)
    return None


def _flag(flag: bool) -> str:
    return "true" if flag else "false"


def _space(max_shared: int, min_blocks: int) -> int:
    """Bytes of shared memory for a block if so many share a multiprocessor."""
    return max_shared // min_blocks - (_RESERVED_BYTES if min_blocks > 1 else 0)


def _require_cells(max_cells: int, launch_shape: LaunchShape, max_shared: int) -> None:
    least = launch_shape.warps * _MIN_CELLS_A_WARP
    if max_cells < least:
        raise ValueError(
            f"{launch_shape} leaves {max_cells} cells for windows in {max_shared} bytes of shared memory; "
            f"{least} are the least. Take fewer warps or blocks, or no windows (tile_px = 0)"
        )


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


def _c_types(signature: Signature, sums: Sums | None = None) -> tuple[str, ...]:
    types = [C_TYPES[signature.value], C_TYPES[signature.locations], C_TYPES[signature.weights]]
    if sums is not None:
        types.insert(1, {"native": C_TYPES[signature.value], "float32": "float", "fixed": "long long"}[sums])
    return tuple(types)


def _instance(kernel: str, types: Sequence[str], *numbers: int | str) -> str:
    return f"msda::{kernel}<{', '.join((*types, *map(str, numbers)))}>"
