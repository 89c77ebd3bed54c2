"""The experiments of the findings on a GPU: right by the rule of the kernels, and presets that run."""

import subprocess
import sys

import pytest
import torch

from detr.benchmark.findings.accumulators import Sums, contention_problem
from detr.benchmark.findings.accumulators import missed_bound as missed_sums
from detr.benchmark.findings.dispatch_order import OrderCase, missed_bound
from detr.benchmark.findings.orders import ORDERS
from detr.benchmark.findings.point_kernels import AddPoints, GatherPoints, Technique
from ops.msda.problem import Gradients
from ops.testing import Case, expectation, random_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch"),
]

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "direction"), [("cuda", "forward"), ("cuda", "backward"), ("point_parallel", "forward")]
)
@pytest.mark.parametrize(("num_levels", "num_points"), [(1, 2), (4, 4), (5, 8)])
def test_every_order_is_right(kernel, direction, order, num_levels, num_points):
    case = OrderCase(kernel, direction, "bf16", 2, num_levels, num_points)
    assert not missed_bound(case, order=order, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("accumulator", ["float32", "native"])
def test_every_accumulator_is_right(accumulator, emulated, dtype):
    assert not missed_sums(Sums("atomics", accumulator, emulated), dtype, DEVICE)


TECHNIQUES = [
    Technique(),
    Technique(head_major=True),
    Technique(head_major=True, pair=True),
    Technique(padded=True),
    Technique(staged=True),
    Technique(staggered=True),
    Technique(head_major=True, pair=True, padded=True, staged=True, staggered=True),
]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_technique_is_right(technique, dtype):
    problem, grad_output = random_problem(Case(N=3, Lq=301, M=8, P=3, spread=0.3), dtype, device=DEVICE)
    output = GatherPoints(problem, technique)()
    gradient = AddPoints(problem, grad_output, technique, torch.float32)()
    gradients = Gradients(gradient, None, None, None)
    comparisons = expectation(problem, grad_output).compare(output, gradients)
    assert len(comparisons) == 2
    assert all(comparison.passed for comparison in comparisons), "\n".join(map(str, comparisons))


def test_contention_on_a_gpu_ends():
    for num_cells in (8192, 1):
        problem, grad_output = contention_problem(num_cells, torch.bfloat16, DEVICE, seed=0)
        for emulated in (False, True):
            gradient = AddPoints(problem, grad_output, Technique(swap=emulated), torch.bfloat16)()
            assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 16, 1), (1, 16, 4), (4, 4, 2), (16, 1, 4), (64, 1, 8)])
def test_every_tiling_is_right(sizes, dtype):
    from detr.benchmark.findings.tile_kernel import TileForward, Tiling

    problem, grad_output = random_problem(Case(N=2, Lq=301, M=8), dtype, device=DEVICE)
    call = TileForward(problem, Tiling(*sizes))
    (comparison,) = expectation(problem, grad_output).compare(call(), Gradients(None, None, None, None))
    assert comparison.passed, str(comparison)
    assert call.launch().n_regs > 0


PRESETS = {
    "ops_flops": ["benchmark.backbone=resnet18", "benchmark.height=320", "benchmark.width=320"],
    "ops_memory": ["benchmark.batch_sizes=[1]", "benchmark.dtypes=[bf16]"],
    "ops_dispatch_order": ["benchmark.num_levels=[2]", "benchmark.num_points=[4]", "benchmark.num_repeats=6"],
    "ops_accumulators": ["benchmark.dtypes=[bf16]", "benchmark.contention_cells=[64]", "benchmark.rounds=1"],
    "ops_tiling": ["benchmark.dtypes=[bf16]", "benchmark.tilings=[[1,16,4],[16,1,4]]", "benchmark.rounds=1"],
    "ops_npu_claims": ["benchmark.batch_sizes=[1]", "benchmark.dtypes=[bf16]", "benchmark.rounds=1"],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_as_a_command(preset, tmp_path, repository, environment):
    command = [sys.executable, "tools/benchmark_ops.py", f"benchmark={preset}", f"output_dir={tmp_path}"]
    run = subprocess.run(
        [*command, *PRESETS[preset]],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    report = (tmp_path / f"{preset}.md").read_text()
    assert "Verdict" in report
    assert "error bound missed" not in report
    assert (tmp_path / f"{preset}.png").stat().st_size > 1000
