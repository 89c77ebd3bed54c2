"""assign: the cheapest assignment, on any device."""

import itertools
from pathlib import Path

import pytest
import torch

from ops import assign

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("queries", [5, 2])
def test_the_assignment_is_the_cheapest_by_brute_force(queries):
    torch.manual_seed(0)
    cost = torch.randn(2, 2, queries, 3)
    assigned = assign(cost, torch.tensor([3, 1]))
    for k, (n, count) in itertools.product(range(2), enumerate((3, 1))):
        problem = cost[k, n, :, :count]
        rows = problem.T if count <= queries else problem
        found = rows[torch.arange(len(rows)), assigned[k, n, : len(rows)]].sum()
        cheapest = min(
            sum(rows[row, column] for row, column in enumerate(columns))
            for columns in itertools.permutations(range(rows.shape[1]), len(rows))
        )
        torch.testing.assert_close(found, cheapest)
        assert (assigned[k, n, len(rows) :] == -1).all()


def test_nothing_to_assign():
    assert assign(torch.zeros(2, 3, 5, 0), torch.zeros(3, dtype=torch.int64)).shape == (2, 3, 0)
    assert (assign(torch.zeros(1, 2, 5, 4), torch.zeros(2, dtype=torch.int64)) == -1).all()


@pytest.mark.parametrize(
    ("cost", "counts", "words"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), r"costs \(K, N, Lq, T\)"),
        (torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64), "bfloat16"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(3, dtype=torch.int64), r"num_targets \(2,\)"),
        (torch.zeros(1, 2, 3, 4), torch.zeros(2), "int64"),
        (torch.zeros(1, 2, 3, 4, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"), "on meta"),
    ],
)
def test_what_cannot_be_assigned_is_refused(cost, counts, words):
    with pytest.raises(ValueError, match=words):
        assign(cost, counts)


def test_kernel_through_the_interpreter(interpret):
    interpret(Path(__file__).with_name("assignment_cases.py"))


@pytest.mark.parametrize("architecture", [80, 90])
def test_kernel_compiles_for(architecture):
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops.assignment.kernel import _assign_kernel

    types = {"cost_ptr": "*fp32", "num_targets_ptr": "*i64", "assigned_ptr": "*i64", "BLOCK": "constexpr"}
    signature = {name: types.get(name, "i32") for name in _assign_kernel.arg_names}
    source = ASTSource(_assign_kernel, signature, constexprs={"BLOCK": 512})
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 1})
    assert "st.global" in compiled.asm["ptx"]


class TestOnTheGPU:
    pytestmark = on_gpu

    @pytest.mark.parametrize("queries", [300, 900, 4096])
    @pytest.mark.parametrize("alike", [False, True])
    def test_totals_equal_scipys(self, queries, alike):
        torch.manual_seed(0)
        counts = torch.tensor([7, 0, 93, 1, 300, 40])
        cost = torch.randn(3, len(counts), queries, 310)
        if alike:
            cost = cost[:, :, :1] + 1e-3 * cost
        mine, reference = assign(cost.cuda(), counts.cuda()).cpu(), assign(cost, counts)
        for k, (n, count) in itertools.product(range(3), enumerate(counts.tolist())):
            row = torch.arange(count)
            totals = [cost[k, n].T[row, found[k, n, :count]].double().sum() for found in (mine, reference)]
            torch.testing.assert_close(totals[0], totals[1], rtol=1e-12, atol=1e-9)
            assert len(set(mine[k, n, :count].tolist())) == count

    def test_runs_repeat_and_nothing_waits(self):
        cost, counts = torch.randn(6, 16, 300, 20, device="cuda"), torch.full((16,), 7, device="cuda")
        first = assign(cost, counts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = assign(cost, counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first, again)
