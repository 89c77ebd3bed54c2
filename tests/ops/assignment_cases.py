"""Cases of the assignment kernel, run by test_assignment.py in a process that interprets Triton."""

import pytest
import torch

from ops.assignment.functional import assign
from ops.assignment.kernel import launch_assign


def solve(cost: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    assigned = num_targets.new_full((*cost.shape[:2], min(cost.shape[2:])), -1)
    launch_assign(cost, num_targets, assigned)
    return assigned


def costs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("queries", "counts"),
    [
        (20, [7, 0, 1]),
        (9, [9, 5, 8]),
        # more targets than queries, beside images with fewer
        (6, [11, 6, 2]),
        (1, [1, 0, 4]),
        (17, [0, 3, 2]),
    ],
)
def test_the_assignment_is_scipys(queries, counts, dtype):
    cost = costs(2, len(counts), queries, max(counts), dtype=dtype)
    num_targets = torch.tensor(counts)
    assert torch.equal(solve(cost, num_targets), assign(cost, num_targets))


def test_queries_that_all_predict_the_same():
    """As at the start of training: every search passes through the columns of all rows before."""
    cost = costs(1, 1, 1, 8).expand(2, 1, 20, 8) + 1e-4 * costs(2, 1, 20, 8, seed=1)
    num_targets = torch.tensor([8])
    assert torch.equal(solve(cost, num_targets), assign(cost, num_targets))


def test_strides_and_magnitudes():
    cost = costs(3, 9, 2, 14).permute(0, 2, 3, 1)  # (3, 2, 14, 9), queries next to each other
    scale = torch.tensor([1e-6, 1.0, 1e6])[:, None, None, None]
    num_targets = torch.tensor([9, 4])
    assert not cost.is_contiguous()
    assert torch.equal(solve(cost * scale, num_targets), assign(cost * scale, num_targets))
    assert torch.equal(solve(cost, num_targets), assign(cost, num_targets))


@pytest.mark.parametrize("counts", [[6, 3], [10, 8]])
def test_equal_costs_give_an_assignment_as_cheap(counts):
    cost = costs(2, 2, 8, max(counts), seed=3).round()
    num_targets = torch.tensor(counts)
    mine, reference = solve(cost, num_targets), assign(cost, num_targets)
    for k in range(2):
        for n, count in enumerate(counts):
            pairs = min(8, count)
            problem = cost[k, n, :, :count] if count > 8 else cost[k, n, :, :count].T
            row = torch.arange(pairs)
            for found in (mine, reference):
                assert len(set(found[k, n, :pairs].tolist())) == pairs
            totals = [problem[row, found[k, n, :pairs]].sum().item() for found in (mine, reference)]
            assert totals[0] == totals[1]
            assert (mine[k, n, pairs:] == -1).all()
