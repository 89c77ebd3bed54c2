# mypy: disallow-untyped-defs=False
"""An experiment: the forward pass in Triton with any tile of queries and points, dispatched in any order.

A program takes `block_q` queries of one head and `block_p` of their points at a time. One query with all its points is
the point-parallel tiling, many queries with a point at a time the query-block tiling that `ops` ships.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.msda.problem import Problem


@dataclass(frozen=True)
class Tiling:
    """What a program takes.

    Attributes:
        block_q: Queries.
        block_p: Points at a time, of the L * P of a query.
        num_warps: Warps a program.
    """

    block_q: int
    block_p: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name, value in (("block_q", self.block_q), ("block_p", self.block_p), ("num_warps", self.num_warps)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} of a tiling must be a power of two; got {value}")

    @property
    def name(self) -> str:
        return f"{self.block_q} x {self.block_p}, {self.num_warps}w"


@triton.jit(do_not_specialize=["S", "Lq", "M", "L", "P"])
def _tile_forward_kernel(
    value_ptr,  # (N, S, M, D)
    locations_ptr,  # (N, Lq, M, L, P, 2)
    weights_ptr,  # (N, Lq, M, L, P)
    sizes_ptr,  # (L, 3) int32: H, W and the first cell of each level
    order_ptr,  # (Lq,) int32: the query of each place
    output_ptr,  # (N, Lq, M, D)
    S,
    Lq,
    M,
    L,
    P,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ORDERED: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    active = place < Lq
    q = place
    if ORDERED:
        q = tl.load(order_ptr + place, mask=active, other=0)
    row = (n * Lq + q) * M + m  # (BLOCK_Q,)
    channels = tl.arange(0, BLOCK_D)
    channel_mask = channels < D
    value_ptr += (n * S * M + m) * D

    total = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for first in range(0, L * P, BLOCK_P):
        point = first + tl.arange(0, BLOCK_P)
        present = active[:, None] & (point < L * P)[None, :]  # (BLOCK_Q, BLOCK_P)
        level = tl.minimum(point // P, L - 1)
        H = tl.load(sizes_ptr + level * 3)[None, :]
        W = tl.load(sizes_ptr + level * 3 + 1)[None, :]
        start = tl.load(sizes_ptr + level * 3 + 2)[None, :]
        sample = row[:, None] * (L * P) + point[None, :]
        x = tl.load(locations_ptr + 2 * sample, mask=present, other=0.0).to(tl.float32) * W - 0.5
        y = tl.load(locations_ptr + 2 * sample + 1, mask=present, other=0.0).to(tl.float32) * H - 0.5
        weight = tl.load(weights_ptr + sample, mask=present, other=0.0).to(tl.float32)
        # false for NaN, so no such coordinate reaches the conversion to int
        inside = present & (x > -1) & (x < W) & (y > -1) & (y < H)
        x = tl.where(inside, x, 0.0)
        y = tl.where(inside, y, 0.0)
        x_floor = tl.floor(x)
        y_floor = tl.floor(y)
        fx = x - x_floor
        fy = y - y_floor
        for k in tl.static_range(4):
            column = x_floor.to(tl.int32) + k % 2
            line = y_floor.to(tl.int32) + k // 2
            valid = inside & (column >= 0) & (column < W) & (line >= 0) & (line < H)
            cell = start + tl.minimum(tl.maximum(line, 0), H - 1) * W + tl.minimum(tl.maximum(column, 0), W - 1)
            corner_weight = weight * (fx if k % 2 == 1 else 1.0 - fx) * (fy if k // 2 == 1 else 1.0 - fy)
            offsets = cell.to(tl.int64) * (M * D)
            values = tl.load(
                value_ptr + offsets[:, :, None] + channels[None, None, :],
                mask=valid[:, :, None] & channel_mask[None, None, :],
                other=0.0,
            ).to(tl.float32)  # (BLOCK_Q, BLOCK_P, BLOCK_D)
            total += tl.sum(values * corner_weight[:, :, None], axis=1)
    tl.store(
        output_ptr + row[:, None] * D + channels[None, :],
        total.to(output_ptr.dtype.element_ty),
        mask=active[:, None] & channel_mask[None, :],
    )


class TileForward:
    """The experiment on one problem, its buffers made before.

    Args:
        problem: With locations and weights.
        tiling: What a program takes.
        order: (Lq,) the query of each place; None dispatches them as they are.
    """

    def __init__(self, problem: Problem, tiling: Tiling, order: Tensor | None = None) -> None:
        value, shapes, locations, weights, *_ = problem
        N, S, M, D = value.shape
        Lq, _, L, P = weights.shape[1:]
        starts = [sum(H * W for H, W in shapes[:level]) for level in range(L)]
        rows = [(H, W, start) for (H, W), start in zip(shapes, starts, strict=True)]
        self._sizes = torch.tensor(rows, dtype=torch.int32, device=value.device)
        self._order = self._sizes if order is None else order.to(device=value.device, dtype=torch.int32)
        self._inputs = (value.contiguous(), locations.contiguous(), weights.contiguous())
        self._numbers = (S, Lq, M, L, P)
        self._grid = (triton.cdiv(Lq, tiling.block_q), M, N)
        self._constants = {
            "D": D,
            "BLOCK_Q": tiling.block_q,
            "BLOCK_P": tiling.block_p,
            "BLOCK_D": triton.next_power_of_2(D),
            "ORDERED": order is not None,
            "num_warps": tiling.num_warps,
        }
        self.output = value.new_empty((N, Lq, M * D))

    def __call__(self) -> Tensor:
        """(N, Lq, M * D), the same buffer at every call."""
        self.launch()
        return self.output

    def launch(self) -> "triton.compiler.CompiledKernel":
        """Launch, and give the compiled kernel back for its registers and shared memory."""
        arguments = (*self._inputs, self._sizes, self._order, self.output, *self._numbers)
        return _tile_forward_kernel[self._grid](*arguments, **self._constants)


def compile_tile(
    tiling: Tiling, dtype: torch.dtype, capability: tuple[int, int], *, D: int = 32, ordered: bool = False
) -> "triton.compiler.CompiledKernel":
    """The kernel as a call with aligned tensors gets it, for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _tile_forward_kernel
    pointer = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    types = {"value_ptr": pointer, "locations_ptr": "*fp32", "weights_ptr": pointer, "output_ptr": pointer}
    types |= {"sizes_ptr": "*i32", "order_ptr": "*i32"}
    constants = {"D": D, "BLOCK_Q": tiling.block_q, "BLOCK_P": tiling.block_p, "BLOCK_D": D, "ORDERED": ordered}
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in types}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options={"num_warps": tiling.num_warps})
