"""Tuning and the fused benchmark on a GPU, as commands; what is tuned is taken by the next process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ops.msda.tuning.device import visible_device
from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.store import TunedClass, tuning_path, update_tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch"),
]

ROOT = Path(__file__).resolve().parents[4]
# a forward pass of an encoder through whatever the table of the device has
FORWARD = """
import json, logging
import torch
from ops.msda.cuda import backend
from ops.msda.tuning.device import device_tuning
from ops.testing import Case, expectation, random_problem
from ops.msda.problem import Gradients

logging.basicConfig(level=logging.INFO)
shapes = ((40, 60), (20, 30), (10, 15), (5, 8))
case = Case(N=8, M=8, shapes=shapes, Lq=sum(H * W for H, W in shapes), form=2)
problem, grad_output = random_problem(case, torch.bfloat16, device="cuda")
(comparison,) = expectation(problem, grad_output).compare(backend.forward(problem), Gradients(*(None,) * 4))
arguments = (backend._signature(problem), problem.value.shape, problem.Lq, shapes, 0, None)
print(json.dumps({
    "kernel": backend._forward_launch(*arguments).kernel.name,
    "source": device_tuning(0).source,
    "passed": comparison.passed,
}))
"""


def run(cache, *arguments):
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True
    )


def test_the_command_tunes_a_class(tmp_path):
    classes = ("directions=[forward]", "dtypes=[bf16]", "regimes=[decoder]")
    effort = ("search.num_screened=3", "search.rounds=2", "search.num_iterations=5")
    done = run(tmp_path, "tools/tune_ops.py", *classes, *effort, f"output_dir={tmp_path}")
    report = (tmp_path / "tune_ops.md").read_text()
    assert "of 1 shape classes have launch shapes faster than the shipped ones" in done.stdout
    assert "## forward, decoder, 16 bit, D = 32" in report
    candidates = [line for line in report.splitlines() if line.startswith(("| cuda", "| triton"))]
    assert len(candidates) > 30
    assert sum("shipped" in line.rsplit("|", 2)[1] for line in candidates) == 1
    # every launch shape gives right results
    assert "wrong" not in report
    kept = list(tmp_path.glob("deformable-detr/tuning/*.json"))
    assert len(kept) == (0 if done.stdout.count("0 of 1 shape classes") else 1)


def test_the_next_process_takes_what_was_tuned(tmp_path):
    device = visible_device(0)
    kind = ShapeClass("forward", 2, None, "encoder", 32, True)
    shipped = shipped_tuning(device).choice(kind)
    choice = replace(shipped, cuda=(LaunchShape("forward", warps=2, min_blocks=6, unroll=1),))
    path = tuning_path(device, tmp_path / "deformable-detr")
    update_tuning(path, device, kind, TunedClass(kind, choice, 1.0, 2.0), {})

    def forward():
        done = run(tmp_path, "-c", FORWARD)
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    result, log = forward()
    assert result["kernel"].endswith(", 2, 1, 6, false>")
    assert result["passed"]
    assert result["source"] == f"tuned ({path.name}, no date)"
    assert "launch shapes of 1 shape classes come from" in log
    path.write_text(path.read_text().replace('"warps": 2', '"warps": 16'))
    result, log = forward()
    (launch_shape,) = shipped.cuda
    tiled = "true" if launch_shape.tile_px else "false"
    numbers = f"{launch_shape.warps}, {launch_shape.unroll}, {launch_shape.min_blocks}, {tiled}>"
    assert result["kernel"].endswith(numbers)
    assert result["passed"]
    assert result["source"] is None
    assert log.count("changed by hand") == 1


def test_the_fused_benchmark(tmp_path):
    effort = ("benchmark.batch_sizes=[2]", "benchmark.rounds=1", "benchmark.num_iterations=4")
    run(tmp_path, "tools/benchmark_ops.py", "benchmark=ops_fused", *effort, f"output_dir={tmp_path}")
    every = [json.loads(line) for line in (tmp_path / "ops_fused.jsonl").read_text().splitlines()]
    # deformops may be missing
    peers = [row for row in every if row["form"] == "eager_deformops"]
    assert [row["dtype"] for row in peers] == ["bf16", "fp32"]
    assert all(row["status"].startswith(("ok", "not run: ")) for row in peers)
    rows = [row for row in every if row["form"] != "eager_deformops"]
    forms = [("bf16", "eager"), ("bf16", "eager_cast"), ("bf16", "fused"), ("fp32", "eager"), ("fp32", "fused")]
    assert [(row["dtype"], row["form"]) for row in rows] == forms
    assert all(row["status"] == "ok" and row["step_ms"] > 0 for row in rows)
    eager, cast, fused = (row["saved_inputs_mib"] for row in rows[:3])
    # in bf16: float32 locations and weights (and bf16 weights) against bf16 offsets and logits, and the points
    samples = 2 * 22_223 * 8 * 16 / 2**20
    assert eager == pytest.approx(samples * 12, rel=0.01)
    assert cast == pytest.approx(samples * 14, rel=0.01)
    assert fused == pytest.approx(samples * 6 + 2 * 22_223 * 4 * 2 * 4 / 2**20, rel=0.01)
    assert (tmp_path / "ops_fused.png").stat().st_size > 1000
