"""Gradients made to break sums in fixed point, and what csrc/scatter32.cuh does with them, in plain PyTorch.

Maps have powers of two as sides and samples lie on fractions of a pixel, so that coordinates and corner weights are
exact in float32 and what remains is the error of the sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.msda.problem import Problem

SHAPES = ((16, 32), (8, 16), (4, 8), (2, 4))
_FRACTIONS = 64
_EPS = 2.0**-24
# so that a unit and its inverse are float32
_LEAST_UNIT = 2.0**-126
# all about the encoder's call: the queries are the cells, samples +- 1.5 px around them, unless the name says otherwise
ADVERSARIAL = (
    "typical",
    "one_huge",
    "one_query",
    "one_cell",
    "alternating",
    "alternating_one_cell",
    "scaled_1e4",
    "zero",
    "tiny",
    "large",
    "offsets_0",
    "offsets_1_map",
    "offsets_10_maps",
)


def adversarial_problem(
    name: str, dtype: torch.dtype, *, N: int = 1, M: int = 1, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Problem, Tensor]:
    """A problem of `ADVERSARIAL` with D = 32 and P = 4, and a gradient of its output.

    Raises:
        ValueError: An unknown name, or numbers that `dtype` cannot hold.
    """
    if name not in ADVERSARIAL or (name in ("tiny", "large") and dtype == torch.float16):
        raise ValueError(f"no problem {name!r} in {dtype}; there are {', '.join(ADVERSARIAL)}")
    generator = torch.Generator(device).manual_seed(seed)
    L, P, D = len(SHAPES), 4, 32
    S = sum(H * W for H, W in SHAPES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    centres = torch.cat([_centres(H, W, device) for H, W in SHAPES])  # (S, 2)
    sides = torch.tensor([(W, H) for H, W in SHAPES], device=device, dtype=torch.float32)[:, None]  # (L, 1, 2)
    spread_px = {"offsets_0": 0 * sides, "offsets_1_map": sides, "offsets_10_maps": 10 * sides}
    offsets = normal(N, S, M, L, P, 2) * spread_px.get(name, torch.tensor(1.5, device=device))
    offsets = torch.round(offsets * _FRACTIONS) / _FRACTIONS
    start = torch.full_like(centres, 0.5) if name.endswith("one_cell") else centres
    if name.endswith("one_cell"):
        offsets = offsets.remainder(0.5)
    locations = start[:, None, None, None] + offsets / sides  # (N, S, M, L, P, 2)
    weights = normal(N, S, M, L * P).softmax(-1).view(N, S, M, L, P).to(dtype)
    value = normal(N, S, M, D).to(dtype)
    grad_output = normal(N, S, M * D)
    if name.startswith("alternating"):
        grad_output = grad_output.abs()
        grad_output[:, ::2] *= -1
    elif name == "one_huge":
        grad_output[0, 77, 5] = 3e4
    elif name == "one_query":
        grad_output[:, :77] = grad_output[:, 78:] = 0
    scale = {"scaled_1e4": 1e4, "zero": 0.0, "tiny": 1e-30, "large": 1e30}
    return Problem(value, SHAPES, locations, weights), (grad_output * scale.get(name, 1.0)).to(dtype)


@dataclass(frozen=True)
class BlockSums:
    """Value gradients as the blocks of scatter32 sum them, with windows over everything.

    Attributes:
        exact: (N, S, M, D) float64.
        given: The same by fixed point.
        allowed: The error docs/numerics.md allows, before a result is rounded to its dtype: (n / 2) units of each
            block, n its addends to the cell, and float32 rounding of products and of sums in global memory.
        number: (N, S, M) addends of a cell.
        largest_sum, largest_addend: Over all blocks, in units: what must stay under 2^31, and under 2^22 for 16 bits.
        excess: The largest unit of a block over the unit that docs/numerics.md states.
    """

    exact: Tensor
    given: Tensor
    allowed: Tensor
    number: Tensor
    largest_sum: float
    largest_addend: float
    excess: float


def block_sums(problem: Problem, grad_output: Tensor, tiles: tuple[int, int]) -> BlockSums:
    """Emulate csrc/scatter32.cuh and csrc/bounds.cuh.

    Args:
        problem: With locations and weights, of as many queries as cells.
        tiles: (columns, rows), as `Launch` has them.
    """
    value, shapes, locations, weights, *_ = problem
    N, S, M, D = value.shape
    Lq, P = problem.Lq, locations.shape[4]
    blocks = tile_of_queries(shapes, tiles, value.device)  # (Lq,)
    num_blocks = tiles[0] * tiles[1]
    grads = grad_output.double().view(N, Lq, M, D)
    magnitude = grads.abs().amax(-1)  # (N, Lq, M)
    is_16_bit = value.dtype.itemsize == 2

    per_query = magnitude * weights.double().abs().sum(-1).amax(-1) * (P / 4)  # (N, Lq, M)
    bound = value.new_zeros((N, num_blocks, M), dtype=torch.float64).index_add_(1, blocks, per_query)
    largest = _block_max(magnitude * weights.double().abs().amax((-1, -2)), blocks, num_blocks)
    gradient = _block_max(magnitude, blocks, num_blocks)
    if is_16_bit:
        stated = torch.maximum(bound * 2.0**-29, largest * 2.0**-21).clamp(min=_LEAST_UNIT)
        unit = _unit(bound, gradient, 21 - _ilogb(largest))
    else:
        first = _unit(bound, gradient, torch.full_like(bound, 126))
        totals = value.new_zeros((N, num_blocks * S, M), dtype=torch.float64)
        for rows, corner, _ in _corners(problem):
            place = _block_rows(blocks, rows, S)
            addend = torch.ceil(corner * magnitude[..., None] / _of_query(first, blocks)[..., None])
            totals.scatter_add_(1, place, addend.nan_to_num(0).transpose(2, 3).flatten(1, 2))
        fullest = totals.view(N, num_blocks, S, M).amax(2) * first  # (N, num_blocks, M)
        stated = (fullest * 2.0**-29).clamp(min=_LEAST_UNIT)
        unit = _unit(fullest, gradient, torch.full_like(bound, 126))

    exact = value.new_zeros((N, S, M, D), dtype=torch.float64)
    sums = value.new_zeros((N, num_blocks * S, M, D), dtype=torch.int64)
    counts = value.new_zeros((N, num_blocks * S, M), dtype=torch.float64)
    absolute, cancelled = torch.zeros_like(exact), torch.zeros_like(exact)
    number = value.new_zeros((N, S, M), dtype=torch.float64)
    largest_addend = 0.0
    for rows, corner, whole in _corners(problem):
        # (N, Lq, M, P) -> (N, Lq * P, M)
        place = _block_rows(blocks, rows, S)
        addends = (corner[..., None] * grads[:, :, :, None]).transpose(2, 3).flatten(1, 2)  # (N, Lq * P, M, D)
        units = _of_query(unit, blocks)[..., None].expand_as(corner).transpose(2, 3).flatten(1, 2)  # (N, Lq * P, M)
        integers = torch.round(addends / units[..., None]).nan_to_num(0)
        largest_addend = max(largest_addend, float(integers.abs().max()))
        sums.scatter_add_(1, place[..., None].expand_as(integers), integers.long())
        some = (addends != 0).any(-1).double()
        counts.scatter_add_(1, place, some)
        cell = rows.transpose(2, 3).flatten(1, 2)
        exact.scatter_add_(1, cell[..., None].expand_as(addends), addends)
        absolute.scatter_add_(1, cell[..., None].expand_as(addends), addends.abs())
        most = (whole.abs()[..., None] * grads[:, :, :, None].abs()).transpose(2, 3).flatten(1, 2)
        cancelled.scatter_add_(1, cell[..., None].expand_as(most), most)
        number.scatter_add_(1, cell, some)
    blocked = sums.view(N, num_blocks, S, M, D)
    given = (blocked.float().double() * unit[:, :, None, :, None]).sum(1)
    fixed = (counts.view(N, num_blocks, S, M) * unit[:, :, None] / 2).sum(1)
    # a corner's weight is a difference of products of the sample's: small ones keep the rounding of the large
    allowed = fixed[..., None] + (8 + 4 * number.sqrt())[..., None] * _EPS * absolute + 2 * _EPS * cancelled
    excess = float((unit / stated).nan_to_num(0).max())
    return BlockSums(exact, given, allowed, number, float(blocked.abs().max()), largest_addend, excess)


def addends(problem: Problem, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """All that is added to value gradients: rows of (N * S * M) and their float64 addends (K, D)."""
    N, S, M, D = problem.value.shape
    grads = grad_output.double().view(N, -1, M, 1, D)
    images = torch.arange(N, device=grads.device).view(N, 1, 1, 1)
    heads = torch.arange(M, device=grads.device).view(M, 1)
    found = [
        (((images * S + rows) * M + heads).flatten(), (corner[..., None] * grads).flatten(0, 3))
        for rows, corner, _ in _corners(problem)
    ]
    return torch.cat([rows for rows, _ in found]), torch.cat([values for _, values in found])


def tile_of_queries(shapes: tuple[tuple[int, int], ...], tiles: tuple[int, int], device: torch.device | str) -> Tensor:
    """(S,) which tile each query belongs to, as csrc/queries.cuh cuts the maps."""
    columns, rows = tiles
    found = []
    for H, W in shapes:
        x = torch.empty(W, dtype=torch.int64, device=device)
        y = torch.empty(H, dtype=torch.int64, device=device)
        for tile in range(columns):
            x[W * tile // columns : W * (tile + 1) // columns] = tile
        for tile in range(rows):
            y[H * tile // rows : H * (tile + 1) // rows] = tile
        found.append((y[:, None] * columns + x).flatten())
    return torch.cat(found)


def _corners(problem: Problem) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each level and corner: the row in value of each sample, its weight and the sample's; all (N, Lq, M, P).

    Weights are float64, and 0 off the map.
    """
    _, shapes, locations, weights, *_ = problem
    start = 0
    for level, (H, W) in enumerate(shapes):
        x = locations[:, :, :, level, :, 0].double() * W - 0.5
        y = locations[:, :, :, level, :, 1].double() * H - 0.5
        x0, y0 = x.floor(), y.floor()
        for row, y_weight in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
            for column, x_weight in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
                inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
                whole = torch.where(inside, weights[:, :, :, level].double(), 0)
                yield torch.where(inside, start + row * W + column, 0).long(), whole * y_weight * x_weight, whole
        start += H * W


def _unit(bound: Tensor, gradient: Tensor, max_exponent: Tensor) -> Tensor:
    """One in fixed point: a power of two such that `bound` is under 2^30; 0 where nothing is added."""
    exponent = torch.minimum(29 - _ilogb(bound), max_exponent)
    exponent = torch.minimum(exponent, 120 - _ilogb(gradient)).clamp(max=126)
    return torch.where(bound > 0, torch.exp2(-exponent), 0)


def _ilogb(x: Tensor) -> Tensor:
    # frexp's mantissa is in [0.5, 1)
    return torch.frexp(x).exponent.double() - 1


def _block_max(x: Tensor, blocks: Tensor, num_blocks: int) -> Tensor:
    """(N, Lq, M) -> (N, num_blocks, M)."""
    N, _, M = x.shape
    index = blocks[None, :, None].expand_as(x)
    return x.new_zeros((N, num_blocks, M)).scatter_reduce_(1, index, x, "amax")


def _of_query(x: Tensor, blocks: Tensor) -> Tensor:
    """(N, num_blocks, M) -> (N, Lq, M)."""
    return x[:, blocks]


def _block_rows(blocks: Tensor, rows: Tensor, S: int) -> Tensor:
    """(N, Lq, M, P) rows of value -> (N, Lq * P, M) rows of the blocks' own sums."""
    return (blocks[None, :, None, None] * S + rows).transpose(2, 3).flatten(1, 2)


def _centres(H: int, W: int, device: torch.device | str) -> Tensor:
    """(H * W, 2) cell centres as (x, y) in [0, 1]."""
    x, y = (torch.arange(W, device=device) + 0.5) / W, (torch.arange(H, device=device) + 0.5) / H
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 2)
