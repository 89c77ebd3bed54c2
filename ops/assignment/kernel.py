# mypy: disallow-untyped-defs=False
"""The Triton kernel of `assign`: shortest augmenting paths, one program a problem.

Rows are given to columns, of which there are at least as many. All that the algorithm knows is kept by column, in
registers: the row that has the column and that row's dual, the column's dual, and in a search the column's distance
and the column before it on the path. Reading one column is a sum in which all others are zero.
"""

import triton
import triton.language as tl
from torch import Tensor

# one warp: the reductions that every step of a search makes then need no barriers; more where columns are many
_COLUMNS_A_WARP = 512


@triton.jit
def _assign_kernel(
    cost_ptr,
    num_targets_ptr,
    assigned_ptr,
    N,
    Lq,
    S,
    stride_k,
    stride_n,
    stride_q,
    stride_t,
    BLOCK: tl.constexpr,
):
    problem = tl.program_id(0)
    image = problem % N
    count = tl.load(num_targets_ptr + image).to(tl.int32)
    cost_ptr += (problem // N).to(tl.int64) * stride_k + image.to(tl.int64) * stride_n
    # the fewer of the two are the rows
    num_rows = tl.minimum(count, Lq)
    num_cols = tl.maximum(count, Lq)
    by_target = count <= Lq
    row_stride = tl.where(by_target, stride_t, stride_q)
    col_stride = tl.where(by_target, stride_q, stride_t)

    cols = tl.arange(0, BLOCK)
    inside = cols < num_cols
    infinity = float("inf")
    row_of = tl.full((BLOCK,), -1, tl.int32)  # -1: the column is free
    row_dual = tl.zeros((BLOCK,), tl.float64)  # of the row that has the column
    col_dual = tl.zeros((BLOCK,), tl.float64)

    new_row = 0
    while new_row < num_rows:
        # Dijkstra's search for the nearest free column, from the row that has none yet
        distance = tl.full((BLOCK,), infinity, tl.float64)
        before = tl.full((BLOCK,), -1, tl.int32)  # -1: reached from the new row
        scanned = cols < 0
        row = new_row
        dual = tl.sum(tl.zeros((BLOCK,), tl.float64))  # a scalar 0.0 in float64
        nearest = dual
        current = -1
        while row >= 0:
            step = tl.load(cost_ptr + row * row_stride + cols * col_stride, mask=inside, other=0.0).to(tl.float64)
            open_cols = inside & (scanned == 0)
            through = nearest + step - dual - col_dual
            shorter = open_cols & (through < distance)
            distance = tl.where(shorter, through, distance)
            before = tl.where(shorter, current, before)
            nearest = tl.min(tl.where(open_cols, distance, infinity))
            # among equals a free column, which ends the search
            order = tl.where(row_of < 0, cols, cols + BLOCK)
            current = tl.min(tl.where(open_cols & (distance == nearest), order, 2 * BLOCK)) % BLOCK
            scanned = scanned | (cols == current)
            row = tl.sum(tl.where(cols == current, row_of, 0))
            dual = tl.sum(tl.where(cols == current, row_dual, 0.0))

        # the free column itself changes by zero
        change = tl.where(scanned, nearest - distance, 0.0)
        row_dual += change
        col_dual -= change

        # shift the rows along the path, from its end to the new row
        path = current
        while path >= 0:
            previous = tl.sum(tl.where(cols == path, before, 0))
            moved_row = tl.where(previous < 0, new_row, tl.sum(tl.where(cols == previous, row_of, 0)))
            moved_dual = tl.where(previous < 0, nearest, tl.sum(tl.where(cols == previous, row_dual, 0.0)))
            row_of = tl.where(cols == path, moved_row, row_of)
            row_dual = tl.where(cols == path, moved_dual, row_dual)
            path = previous
        new_row += 1

    tl.store(assigned_ptr + problem.to(tl.int64) * S + row_of, cols.to(tl.int64), mask=row_of >= 0)


def launch_assign(cost: Tensor, num_targets: Tensor, assigned: Tensor) -> None:
    """Write the assignments of `cost` (K, N, Lq, T) into `assigned` (K, N, S), contiguous and full of -1."""
    K, N, Lq, T = cost.shape
    block = max(16, triton.next_power_of_2(max(Lq, T)))
    _assign_kernel[(K * N,)](
        cost,
        num_targets,
        assigned,
        N,
        Lq,
        assigned.shape[-1],
        *cost.stride(),
        BLOCK=block,
        num_warps=max(1, min(8, block // _COLUMNS_A_WARP)),
    )
