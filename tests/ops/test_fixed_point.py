"""Sums in fixed point under gradients made to break them: by emulation on the CPU, and the kernels on a GPU.

The emulation proves the bound that docs/numerics.md states; the kernels are then held to it cell by cell.
"""

import pytest
import torch

from ops.msda.cuda import backend
from ops.msda.fixed_point import fixed_point_scale, from_fixed_point
from ops.msda.tuning.device import visible_device
from ops.msda.tuning.shape_class import ShapeClass, sums_of
from ops.msda.tuning.shipped import shipped_tuning
from ops.testing import compare
from ops.testing_fixed_point import (
    ADVERSARIAL,
    SHAPES,
    addends,
    adversarial_problem,
    block_sums,
    tile_of_queries,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# half a unit in the last place of a result, and the least number of the dtype
ROUNDING = {F32: (2.0**-24, 2.0**-149), F16: (2.0**-11, 2.0**-24), BF16: (2.0**-8, 2.0**-133)}
CELLS = [
    (name, dtype)
    for name in ADVERSARIAL
    for dtype in (F32, F16, BF16)
    if not (name in ("tiny", "large") and dtype == F16)
]
cells = pytest.mark.parametrize(("name", "dtype"), CELLS, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in CELLS])


def test_problems_are_what_they_are_called():
    S = sum(H * W for H, W in SHAPES)
    for name, dtype in CELLS:
        problem, grad_output = adversarial_problem(name, dtype)
        assert problem.value.shape == (1, S, 1, 32)
        assert problem.Lq == S
        assert torch.isfinite(grad_output).all()
        # exact in float32, so that sums are all that can go wrong
        pixels = problem.locations[:, :, :, 0, :, 0] * SHAPES[0][1]
        assert torch.equal((pixels - 0.5).double(), pixels.double() - 0.5)
    huge = adversarial_problem("one_huge", F32)[1].abs().flatten().sort().values
    assert huge[-1] > 5000 * huge[-2]
    far = adversarial_problem("offsets_10_maps", F32)[0].locations
    assert ((far < 0) | (far > 1)).any(-1).float().mean() > 0.9
    H, W = SHAPES[0]
    same = (adversarial_problem("one_cell", F32)[0].locations[:, :, :, 0] * torch.tensor([W, H]) - 0.5).floor()
    assert (same == torch.tensor([W / 2 - 1, H / 2 - 1])).all()
    with pytest.raises(ValueError, match="no problem 'tiny' in"):
        adversarial_problem("tiny", F16)


@cells
def test_32_bit_sums_keep_the_stated_bound(name, dtype):
    """The kernel's arithmetic in plain PyTorch: nothing overflows, and errors are (n / 2) units at most."""
    sums = block_sums(*adversarial_problem(name, dtype), tiles=(3, 2))
    # the sign takes a bit
    assert sums.largest_sum < 2**31
    if dtype != F32:
        # adding 1.5 * 2^23 rounds to the nearest integer up to here
        assert sums.largest_addend <= 2**22
    assert sums.excess <= 1
    assert ((sums.given - sums.exact).abs() <= sums.allowed).all()
    assert (sums.exact != 0).any() == (name != "zero")


@cells
def test_64_bit_sums_are_the_same_in_any_order(name, dtype):
    problem, grad_output = adversarial_problem(name, dtype)
    scale = fixed_point_scale(problem, grad_output)
    assert torch.isfinite(scale)
    assert torch.equal(torch.frexp(scale).mantissa, torch.tensor(0.5)), "a power of two"
    rows, values = addends(problem, grad_output)
    integers = torch.round(values * scale.double()).long()
    S = problem.value.shape[1]
    in_order = torch.zeros(S, 32, dtype=torch.int64).index_add_(0, rows, integers)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.zeros_like(in_order).index_add_(0, rows[order], integers[order]), in_order)
    # no order of partial sums overflows either
    magnitudes = torch.zeros(S, 32, dtype=torch.float64).index_add_(0, rows, integers.double().abs())
    assert magnitudes.max() < 2**62
    exact = torch.zeros(S, 32, dtype=torch.float64).index_add_(0, rows, values)
    counts = torch.zeros(S, dtype=torch.float64).index_add_(0, rows, (values != 0).any(-1).double())
    relative, least = ROUNDING[dtype]
    given = from_fixed_point(in_order, scale, dtype)
    allowed = counts[:, None] / 2 / scale.double() + 1.01 * (relative + 2.0**-24) * exact.abs() + least
    overflows = exact.abs() + allowed > torch.finfo(dtype).max
    assert ((given.double() - exact).abs() <= allowed)[~overflows].all()


def test_a_gradient_that_is_not_finite_makes_the_scale_nan():
    for bad in (float("nan"), float("inf")):
        problem, grad_output = adversarial_problem("typical", BF16)
        grad_output[0, 7, 3] = bad
        assert torch.isnan(fixed_point_scale(problem, grad_output))


def test_tiles_hold_every_query_once():
    tiles = tile_of_queries(SHAPES, (3, 2), "cpu")
    counts = tiles.bincount(minlength=6)
    assert len(counts) == 6
    # a tile has its share of every level
    assert counts.min() > 0.6 * counts.max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch")
class TestKernels:
    """Held to the bound of the emulation with their own tiles; a decoder's kernel adds in float32 or 64 bits."""

    @cells
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("regime", ["encoder", "decoder"])
    def test_every_cell_is_within_the_bound(self, name, dtype, deterministic, regime):
        problem, grad_output = adversarial_problem(name, dtype, N=4, M=8, device="cuda")
        sums = sums_of(dtype, "float32", deterministic)
        kind = ShapeClass("backward", dtype.itemsize, sums, regime, 32, True)
        launch_shapes = shipped_tuning(visible_device(0)).choice(kind).cuda
        needs = (True, True, True, False)

        def run():
            return backend.backward(problem, grad_output, needs, "float32", deterministic, launch_shapes)

        gradients = run()
        tile_px = max(shape.tile_px for shape in launch_shapes) or 14
        tiles = (-(-SHAPES[0][1] // tile_px), -(-SHAPES[0][0] // tile_px))
        right = block_sums(problem, grad_output, tiles)
        relative, least = ROUNDING[dtype]
        allowed = right.allowed + 1.01 * relative * right.exact.abs() + least
        if deterministic:
            allowed += right.number[..., None] / fixed_point_scale(problem, grad_output).double()
        overflows = right.exact.abs() + allowed > torch.finfo(dtype).max
        excess = ((gradients.value.double() - right.exact).abs() / allowed)[~overflows].max()
        assert excess <= 1, f"a cell is off by {float(excess):.2f} times what is allowed"
        if name == "zero":
            assert all((grad == 0).all() for grad in gradients[:3])
        if deterministic:
            assert all(torch.equal(a, b) for a, b in zip(gradients[:3], run()[:3], strict=True))

    @cells
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_all_gradients_follow_the_rule(self, name, dtype, deterministic):
        """As the public function runs it, whatever the table of the device has."""
        problem, grad_output = adversarial_problem(name, dtype, N=4, M=8, device="cuda")
        gradients = backend.backward(problem, grad_output, (True, True, True, False), "float32", deterministic)
        comparisons = compare(problem, grad_output, backend.forward(problem), gradients)
        # samples of one fraction give the output's yardstick one rounding, which is luck
        of_gradients = [comparison for comparison in comparisons if comparison.name != "output"]
        assert len(of_gradients) == 3
        assert all(comparison.passed for comparison in of_gradients), "\n".join(map(str, of_gradients))
