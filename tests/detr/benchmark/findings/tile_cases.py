"""The experiment in Triton on CPU tensors, through Triton's interpreter; run by test_findings_tiles.py."""

import pytest
import torch

from detr.benchmark.findings.orders import dispatch_order
from detr.benchmark.findings.tile_kernel import TileForward, Tiling
from ops.msda.problem import Gradients
from ops.testing import Case, expectation, random_problem

SHAPES = ((5, 3), (2, 4), (1, 1))
NONE = Gradients(None, None, None, None)


def missed(case, tiling, dtype=torch.float32, order=None):
    """The comparison with float64 as text, unless it passed."""
    problem, grad_output = random_problem(case, dtype)
    output = TileForward(problem, tiling, order)()
    (comparison,) = expectation(problem, grad_output).compare(output, NONE)
    return "" if comparison.passed else str(comparison)


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    [
        (Tiling(1, 8), torch.float32),
        (Tiling(1, 2), torch.float32),
        (Tiling(2, 2), torch.float32),
        (Tiling(4, 1), torch.float32),
        (Tiling(4, 4), torch.float16),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_tiling_is_right(tiling, dtype):
    assert not missed(Case(N=1, Lq=5, M=2, D=8, P=2, shapes=SHAPES), tiling, dtype)


def test_an_order_changes_nothing_but_the_order():
    shapes = ((2, 3), (1, 2))
    case = Case(N=2, Lq=8, M=1, D=4, P=1, shapes=shapes)
    assert not missed(case, Tiling(1, 2), order=torch.from_numpy(dispatch_order("random", shapes)))


def test_odd_channels_and_points():
    assert not missed(Case(N=1, Lq=3, M=1, D=20, P=3, shapes=SHAPES), Tiling(2, 8))


def test_bad_coordinates_give_zero():
    problem, _ = random_problem(Case(N=1, Lq=2, M=1, D=4, P=2, shapes=SHAPES), torch.float32)
    problem.locations.fill_(float("nan"))
    problem.locations[:, 1:] = 1e30
    assert (TileForward(problem, Tiling(1, 8))() == 0).all()
