"""Launch shapes worth timing, by kernel. A new variant of a kernel is a line here."""

from collections.abc import Mapping
from itertools import product

from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import ShapeClass

_WARPS = (2, 4, 8)
# warps a multiprocessor that registers are bounded for
_RESIDENT = {"forward": (24, 32, 36, 40), "dots32": (20, 24, 28, 32), "backward": (16, 24, 32)}
_UNROLLS = (1, 2, 4)
# scatter32: warps and blocks share the registers, tiles and blocks the shared memory
_SCATTER_BLOCKS = ((32, 1), (24, 1), (16, 1), (16, 2), (12, 2), (10, 3), (8, 3), (8, 4))
_SCATTER_TILES_PX = (10, 12, 13, 14, 15, 16, 18, 20, 24)
# forward, dots32: warps and blocks of those that go through tiles, and the tiles
_TILED_BLOCKS = {"forward": ((32, 1), (24, 1), (16, 2)), "dots32": ((28, 1), (24, 1), (20, 1), (12, 2))}
_TILES_PX = (6, 8, 10, 12)
_COLLECT = ((4, 8), (8, 4), (8, 5), (8, 6), (16, 2), (16, 3), (16, 4), (32, 1), (32, 2))  # warps, blocks
_SCATTER_DIRECT = LaunchShape("scatter32", warps=4, min_blocks=4)
_TRITON = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))  # queries, warps


def variants(kernel: str) -> tuple[LaunchShape, ...]:
    """Every launch shape of one kernel to try."""
    if kernel == "triton":
        return tuple(LaunchShape(kernel, warps, queries=queries) for queries, warps in _TRITON)
    if kernel == "scatter32":
        windows = product(_SCATTER_BLOCKS, _SCATTER_TILES_PX)
        return (_SCATTER_DIRECT, *(LaunchShape(kernel, *block, tile_px=tile_px) for block, tile_px in windows))
    if kernel == "collect32":
        return tuple(LaunchShape(kernel, *block) for block in _COLLECT)
    unrolls = (1,) if kernel == "dots32" else _UNROLLS
    shapes = (
        LaunchShape(kernel, warps, resident // warps, unroll)
        for warps, resident, unroll in product(_WARPS, _RESIDENT[kernel], unrolls)
    )
    tiled = (
        LaunchShape(kernel, *block, unroll, tile_px)
        for block, unroll, tile_px in product(_TILED_BLOCKS.get(kernel, ()), unrolls, _TILES_PX)
    )
    return tuple(dict.fromkeys((*shapes, *tiled)))


def cuda_bases(kind: ShapeClass, shipped: tuple[LaunchShape, ...]) -> list[tuple[LaunchShape, ...]]:
    """The CUDA kernels to vary for a class: the shipped ones, and others that can do the same where that is open."""
    if kind.direction == "forward" or not kind.fits32 or kind.regime == "encoder":
        return [shipped]
    # where there is less work, one pass and two are worth comparing
    if shipped[0].kernel == "backward":
        dots, collect = LaunchShape("dots32", warps=4, min_blocks=6), LaunchShape("collect32", warps=16, min_blocks=2)
        return [shipped, (dots, collect, _SCATTER_DIRECT)]
    return [shipped, (LaunchShape("backward", warps=4, min_blocks=4, unroll=2),)]


def varied(base: tuple[LaunchShape, ...]) -> list[tuple[LaunchShape, ...]]:
    """The base, and each with one of its kernels replaced by a variant."""
    found = [base]
    for place, shape in enumerate(base):
        found += [(*base[:place], variant, *base[place + 1 :]) for variant in variants(shape.kernel)]
    return list(dict.fromkeys(found))


def combined(
    base: tuple[LaunchShape, ...], times_ms: Mapping[tuple[LaunchShape, ...], float]
) -> tuple[LaunchShape, ...]:
    """The best kernel of each place together.

    Args:
        times_ms: Of what `varied` returned for the base, without those that did not run.
    """
    best = []
    for place, shape in enumerate(base):
        others = (*base[:place], *base[place + 1 :])
        # kernels run one after the other, so that those which differ here only compare this kernel
        same = {
            shapes[place]: ms
            for shapes, ms in times_ms.items()
            if len(shapes) == len(base) and (*shapes[:place], *shapes[place + 1 :]) == others
        }
        best.append(min(same, key=same.__getitem__, default=shape))
    return tuple(best)
