"""The operator benchmark without a GPU: its inputs, its arithmetic and its report."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from detr.benchmark.ops.inputs import ENCODER_SHAPES, OpCase, compulsory_bytes, make_inputs
from detr.benchmark.ops.measure import OpVariant
from detr.benchmark.ops.report import markdown_report, plot_report, plot_spread
from detr.benchmark.ops.row import OpRow, write_rows
from detr.benchmark.origin import Origin
from ops.timing import Timing, num_rotated

CPU = torch.device("cpu")
ROW = OpRow(
    case="encoder",
    batch_size=2,
    noise_px=1.5,
    dtype="bf16",
    backend="cuda",
    accumulator="float32",
    deterministic=False,
    status="ok",
    verified=True,
    forward_ms=0.2,
    forward_p20_ms=0.19,
    forward_p80_ms=0.21,
    forward_grad_ms=0.22,
    backward_ms=0.5,
    backward_p20_ms=0.49,
    backward_p80_ms=0.52,
    peak_mib=123.0,
    forward_gbps=500.0,
    backward_gbps=400.0,
    error_output=1.7e-3,
    error_grad_value=1.6e-3,
    error_grad_locations=3e-7,
    error_grad_weights=1.6e-3,
)
ROWS = [
    ROW,
    replace(ROW, backend="deformops", forward_ms=0.4, backward_ms=1.0, verified=None),
    replace(ROW, backend="deformops", accumulator="native", forward_ms=0.4, backward_ms=0.8, verified=None),
    replace(ROW, backend="grid_sample", forward_ms=4.0, backward_ms=10.0, verified=None),
    OpRow("encoder", 2, 1.5, "bf16", "triton", "native", False, "error bound missed: grad value", verified=False),
]

HEADER = {"title": "T", "command": "python x", "environment": "gpu  H", "date": "2026-01-02", "picture": "p.png"}


def test_encoder_queries_are_the_cells_and_look_around_themselves():
    problem, grad_output = make_inputs(
        OpCase("encoder", 1, noise_px=0.0, num_heads=2, head_dim=4), torch.bfloat16, CPU, seed=0
    )
    S = sum(H * W for H, W in ENCODER_SHAPES)
    assert problem.locations.shape == (1, S, 2, 4, 4, 2)
    assert problem.locations.dtype == torch.float32
    assert grad_output.shape == (1, S, 8)
    # the first head looks right, one to four pixels of each level away
    q = 3 * 167 + 5
    for level, (H, W) in enumerate(ENCODER_SHAPES):
        x = problem.locations[0, q, 0, level, :, 0] - 5.5 / 167
        torch.testing.assert_close(x * W, torch.tensor([1.0, 2, 3, 4]), rtol=1e-3, atol=1e-3)
        y = problem.locations[0, q, 0, level, :, 1] - 3.5 / 100
        torch.testing.assert_close(y * H, torch.zeros(4), rtol=0, atol=1e-3)


def test_compulsory_bytes_are_those_of_the_arithmetic():
    problem, _ = make_inputs(OpCase("decoder", 2, num_queries=10), torch.bfloat16, CPU, seed=0)
    S = sum(H * W for H, W in ENCODER_SHAPES)
    value, locations, weights, output = 2 * S * 256 * 2, 2 * 10 * 8 * 16 * 2 * 4, 2 * 10 * 8 * 16 * 2, 2 * 10 * 256 * 2
    assert compulsory_bytes(problem, backward=False) == value + locations + weights + output
    assert compulsory_bytes(problem, backward=True) == 2 * (value + locations + weights) + output


def test_timing_is_the_median_with_percentiles():
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 5.0)
    assert num_rotated(10**9) == 1
    assert num_rotated(10**6) == 189


def test_report_holds_the_ratios_and_the_reasons(tmp_path):
    report = markdown_report(ROWS, Origin("T", "python x", "gpu  H", "2026-01-02", "p.png"))
    (line,) = [line for line in report.splitlines() if line.startswith("| cuda float32")]
    cells = [cell.strip() for cell in line.split("|")]
    # half the peer's time forward and backward, 20 times grid_sample
    assert cells[5:9] == ["0.50", "0.50", "20.0", "20.0"]
    assert "| triton native | error bound missed: grad value |" in report
    assert "2026-01-02" in report
    assert "$ python x" in report
    assert "![T](p.png)" in report
    plot_report(ROWS, tmp_path / "a.png", title="T")
    plot_spread([ROW, replace(ROW, noise_px=8.0)], tmp_path / "b.png", title="T")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (tmp_path / "b.png").stat().st_size > 1000
    write_rows(ROWS, tmp_path / "a.csv", tmp_path / "a.jsonl")
    with (tmp_path / "a.csv").open() as file:
        assert [row["backend"] for row in csv.DictReader(file)] == [row.backend for row in ROWS]
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["forward_ms"] == 0.2


def test_a_row_names_its_backend():
    problem, _ = make_inputs(OpCase("decoder", 1, num_queries=2), torch.float32, CPU, seed=0)
    with pytest.raises(ValueError, match=r"must be cuda, triton, grid_sample or deformops; got 'auto'"):
        OpVariant("auto").function(problem)
    with pytest.raises(ValueError, match="case must be encoder, uniform or decoder; got 'both'"):
        OpCase("both", 1)
    output = OpVariant("grid_sample").function(problem)(problem.value, problem.locations, problem.weights)
    assert output.shape == (1, 2, 256)
