"""The few queries among which a cheapest assignment is sure to be.

Shapes: K layers, N images, Lq queries, T the most boxes of any image, R = T * T candidates.
"""

import torch
from torch import Tensor

# not for a decoder's few hundred queries, which are solved as they are
_MIN_LEFT_OUT = 2048


def cheapest_candidates(cost: Tensor) -> tuple[Tensor, Tensor | None]:
    """Leave out the queries that no cheapest assignment needs.

    Of the T cheapest queries of a box the other T - 1 boxes can take all but one, so a box that was given any other
    query could change to one of these and cost no more: the T cheapest queries of every box hold a cheapest assignment.
    A two-stage model has some 20,000 proposals an image, of which a handful of boxes needs few.

    Args:
        cost: (K, N, Lq, T), finite and below the largest number of its dtype.

    Returns:
        The costs of the candidates (K, N, R, T) and which queries they are (K, N, R) int64, ascending; a query that
        is the candidate of several boxes stands there as often, and all but its first copy cost more than any query.
        Where R is not far below Lq: `cost` as it is, and None.
    """
    num_queries, T = cost.shape[2:]
    if T == 0 or num_queries - T * T < _MIN_LEFT_OUT:
        return cost, None
    queries = cost.transpose(2, 3).topk(T, dim=-1, largest=False, sorted=False).indices  # (K, N, T, T)
    queries = queries.flatten(2).sort(dim=-1).values  # (K, N, R)
    candidates = cost.gather(2, queries[..., None].expand(-1, -1, -1, T))  # (K, N, R, T)
    is_copy = torch.zeros_like(queries, dtype=torch.bool)
    is_copy[..., 1:] = queries[..., 1:] == queries[..., :-1]
    # sums of T real costs stay below one such
    dearest = ((cost.abs().amax() + 1) * (2 * T)).clamp(max=torch.finfo(cost.dtype).max)
    return candidates.where(~is_copy[..., None], dearest), queries
