"""The accumulators without a GPU: kernels compile to the atomics that were meant, contention is what it says."""

import re
from dataclasses import replace

import pytest
import torch

from detr.benchmark.findings.accumulators import (
    AccumulatorRow,
    Sums,
    affordable,
    contention_problem,
    level_errors,
    value_gradient,
)
from detr.benchmark.findings.accumulators_report import markdown, plot, verdict
from detr.benchmark.findings.point_kernels import (
    Technique,
    add_instance,
    experiment_sources,
    first_staged_level,
    gather_instance,
    laid_out,
    taken_back,
)
from detr.benchmark.origin import Origin
from ops.msda.cuda.compiler import compile_kernel, compile_ptx
from ops.testing import Case, random_problem, run_reference

ORIGIN = Origin("T", "python x", "gpu  H", "2026-01-02", "p.png")
CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALL = Technique(head_major=True, pair=True, padded=True, staged=True, staggered=True)


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA wheels")
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "instance",
    [
        add_instance(BF16, BF16, Technique(swap=True)),
        add_instance(F16, F32, Technique()),
        add_instance(BF16, F32, ALL),
        gather_instance(BF16, ALL),
        gather_instance(F32, Technique()),
    ],
)
def test_experiments_compile(kernel_cache, instance, architecture):
    compiled = compile_kernel(instance, architecture, cache_dir=kernel_cache, extra_sources=experiment_sources())
    assert compiled.image[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("value", "sums", "swap", "architecture", "meant", "unwanted"),
    [
        (BF16, BF16, False, "compute_90", r"\bred\.\S*v2\.bf16x2", r"\batom\.\S*cas"),
        (F16, F32, False, "compute_90", r"\bred\.\S*v4\.f32", r"\batom\.\S*cas"),
        (BF16, BF16, True, "compute_90", r"\batom\.\S*cas\.b32", r"\bred\.global"),
        (F32, F32, True, "compute_90", r"\batom\.\S*cas\.b32", r"\bred\.global"),
        # the claim's premise: before Hopper there is nothing but the loop
        (BF16, BF16, False, "compute_80", r"\batom\.\S*cas", r"\bred\.\S*bf16"),
    ],
)
def test_atomics_are_those_that_were_meant(kernel_cache, value, sums, swap, architecture, meant, unwanted):
    instance = add_instance(value, sums, Technique(swap=swap))
    text = compile_ptx(instance, architecture, extra_sources=experiment_sources())
    assert re.search(meant, text)
    assert not re.search(unwanted, text)


@pytest.mark.parametrize("technique", [Technique(), Technique(head_major=True), Technique(padded=True), ALL])
def test_layouts_lead_back(technique):
    shapes = ((3, 4), (2, 5), (1, 1))
    value = torch.randn(2, 23, 3, 4)
    laid = laid_out(value, shapes, technique)
    assert laid.is_contiguous()
    assert torch.equal(taken_back(laid, shapes, technique), value)
    assert (
        laid.shape
        == {
            (False, False): (2, 23, 3, 4),
            (True, False): (2, 3, 23, 4),
            (False, True): (2, 67, 3, 4),
            (True, True): (2, 3, 67, 4),
        }[technique.head_major, technique.padded]
    )
    torch.testing.assert_close(laid.double().sum(), value.double().sum())


def test_padding_is_around_each_map():
    laid = laid_out(torch.ones(1, 2 * 3 + 1, 1, 1), ((2, 3), (1, 1)), Technique(padded=True)).flatten()
    assert laid[:20].view(4, 5).tolist() == [[0] * 5, [0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0] * 5]
    assert laid[20:].view(3, 3).tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_as_many_coarse_levels_are_staged_as_fit():
    shapes = ((100, 167), (50, 84), (25, 42), (13, 21))
    cells = {3: 13 * 21, 2: 13 * 21 + 25 * 42}
    assert first_staged_level(shapes, border=0, cell_bytes=64, max_bytes=cells[2] * 64) == 2
    assert first_staged_level(shapes, border=0, cell_bytes=64, max_bytes=cells[2] * 64 - 1) == 3
    assert first_staged_level(shapes, border=2, cell_bytes=64, max_bytes=cells[2] * 64) == 3
    assert first_staged_level(shapes, border=0, cell_bytes=64, max_bytes=100) == 4


def test_a_pair_needs_neighbours_in_memory():
    with pytest.raises(ValueError, match="pair=True needs head_major=True"):
        Technique(pair=True)
    assert Technique(head_major=True, pair=True).name == "head_major + pair"


@pytest.mark.parametrize("num_cells", [8192, 64, 1])
def test_contention_is_the_addends_of_a_cell(num_cells):
    problem, grad_output = contention_problem(num_cells, F32, CPU, seed=0)
    ones = torch.ones_like(grad_output)
    gradient = run_reference(problem, ones, torch.float64)[1].value
    assert gradient is not None
    # a weight of a quarter a sample, 8,192 samples a head
    sums = gradient[0, :, 0, 0]
    assert (sums[:num_cells] == 8192 / num_cells / 4).all()
    assert (sums[num_cells:] == 0).all()


def test_contention_must_be_even():
    for bad in (0, 3, 16384):
        with pytest.raises(ValueError, match="num_cells must divide the 8192"):
            contention_problem(bad, F32, CPU, seed=0)


def test_errors_are_of_each_level():
    problem, grad_output = random_problem(Case(), F32)
    exact = run_reference(problem, grad_output, torch.float64)[1].value
    assert exact is not None
    given = exact.clone()
    given[:, -6:] *= 1.5
    assert level_errors(given, exact, problem) == pytest.approx((0, 0, 0.5))


def test_long_calls_are_timed_less_often():
    assert affordable(20, 0.1) == 20
    assert affordable(20, 50.0) == 10
    assert affordable(20, 5000.0) == 3


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="emulated of atomics alone; got 'cuda'"):
        Sums("cuda", emulated=True)
    problem, grad_output = random_problem(Case(D=16), F32)
    with pytest.raises(ValueError, match="the experiments take float32 locations and D = 32"):
        value_gradient(Sums("atomics"), problem, grad_output)


class TestReport:
    FLOAT32 = AccumulatorRow(
        "encoder", 2, "bf16", None, "atomics", "float32", False, "ok", True, 1.0, 0.9, 1.1, 1e-3, (1e-3, 2e-3)
    )
    NATIVE = replace(FLOAT32, accumulator="native", value_grad_ms=0.6)
    EMULATED = replace(NATIVE, emulated=True, value_grad_ms=5.0)

    def test_verdict(self):
        rows = [self.FLOAT32, self.NATIVE, self.EMULATED]
        assert verdict(rows).startswith("reproduced: emulated bf16 atomics take 5.00x the time of float32's")
        assert "bf16 0.60x" in verdict(rows)
        assert verdict([*rows[:2], replace(self.EMULATED, value_grad_ms=1.2)]).startswith("refuted")
        assert verdict(rows[:2]).startswith("open")

    def test_report(self, tmp_path):
        contention = [
            replace(row, workload="contention", num_cells=cells, value_grad_ms=(row.value_grad_ms or 0) / cells)
            for cells in (64, 1)
            for row in (self.FLOAT32, self.EMULATED)
        ]
        failed = replace(self.NATIVE, kernel="triton", status="error bound missed", value_grad_ms=None, verified=False)
        rows = [self.FLOAT32, self.NATIVE, self.EMULATED, failed, *contention]
        text = markdown(rows, ORIGIN)
        cells = [
            "atomics native emulated",
            "5.0000 [0.9000, 1.1000]",
            "5.00",
            "1.0e-03",
            "1.0e-03",
            "2.0e-03",
            "passed",
        ]
        assert f"| {' | '.join(cells)} |" in text
        assert "| triton native | error bound missed |" in text
        assert "| 1 | 1.0000 | 5.0000 |" in text
        plot(rows, tmp_path / "p.png", title="T")
        assert (tmp_path / "p.png").stat().st_size > 1000
