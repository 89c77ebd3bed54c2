"""Orders in which the queries of an encoder can be dispatched."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ORDERS = ("linear", "reversed", "random", "morton", "hilbert", "column_major", "tiled_8x8")
_TILE_PX = 8

Indices = NDArray[np.int64]


def dispatch_order(name: str, spatial_shapes: Sequence[tuple[int, int]], *, seed: int = 0) -> Indices:
    """The query at each place of the order.

    Curves and tiles run within each level, and levels stay in order; `reversed` and `random` take all queries together.

    Args:
        name: One of `ORDERS`.
        spatial_shapes: (H, W) a level; the queries are the cells, levels one after the other, each row-major.
        seed: Of `random`.

    Returns:
        (S,) a permutation of the S = sum(H * W) queries.

    Raises:
        ValueError: An unknown name.
    """
    if name not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {name!r}")
    S = sum(H * W for H, W in spatial_shapes)
    if name == "linear":
        return np.arange(S)
    if name == "reversed":
        return np.arange(S)[::-1].copy()
    if name == "random":
        return np.random.default_rng(seed).permutation(S)
    parts, start = [], 0
    for H, W in spatial_shapes:
        y, x = (side.ravel() for side in np.meshgrid(np.arange(H), np.arange(W), indexing="ij"))
        if name == "column_major":
            keys: tuple[Indices, ...] = (y, x)
        elif name == "tiled_8x8":
            keys = (x, y, x // _TILE_PX, y // _TILE_PX)
        elif name == "morton":
            keys = (morton_index(x, y),)
        else:
            keys = (hilbert_index(x, y, side=_power_of_two(max(H, W))),)
        # the last key counts most
        parts.append(start + np.lexsort(keys))
        start += H * W
    return np.concatenate(parts)


def morton_index(x: Indices, y: Indices) -> Indices:
    """Bits of x and y in turns, those of x lower; x and y below 2^31."""
    index = np.zeros_like(x, dtype=np.int64)
    for bit in range(31):
        index |= (x >> bit & 1) << 2 * bit
        index |= (y >> bit & 1) << 2 * bit + 1
    return index


def hilbert_index(x: Indices, y: Indices, *, side: int) -> Indices:
    """Places of cells along Hilbert's curve over a square.

    A map that is no such square takes the part of the curve that lies on it, and skips where the curve leaves it.

    Args:
        x, y: Cells, in [0, side).
        side: Of the square, a power of two.
    """
    x, y = x.copy(), y.copy()
    index = np.zeros_like(x, dtype=np.int64)
    half = side // 2
    while half > 0:
        right, low = (x & half) > 0, (y & half) > 0
        index += half * half * ((3 * right) ^ low)
        # the curve of an upper quarter is turned: mirrored where it is the right one, then transposed
        mirrored = ~low & right
        x, y = np.where(mirrored, side - 1 - x, x), np.where(mirrored, side - 1 - y, y)
        x, y = np.where(low, x, y), np.where(low, y, x)
        half //= 2
    return index


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
