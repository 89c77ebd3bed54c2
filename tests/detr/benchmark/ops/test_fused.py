"""The fused form's benchmark without a GPU: its forms compute the same, and what is saved is counted once."""

import csv
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from detr.benchmark.ops.fused import (
    FORMS,
    FusedRow,
    StepInForm,
    attend_in_form,
    check_form,
    recorded_storages,
    with_step_times,
)
from detr.benchmark.ops.fused_report import fused_markdown, plot_fused
from detr.benchmark.ops.inputs import OpCase
from detr.benchmark.ops.row import write_rows
from detr.benchmark.origin import Origin
from ops.msda.reference import ms_deform_attn_reference
from ops.testing import Case, random_problem

FUSED = FusedRow(8, "bf16", "cuda", "fused", "ok", True, 3.0, 2.9, 3.1, 400.0, 90.0, 500.0)
EAGER = FusedRow(8, "bf16", "cuda", "eager", "ok", None, 6.6, 6.5, 6.7, 500.0, 200.0, 900.0)


@pytest.fixture
def problem():
    return random_problem(Case(N=2, M=2, D=8, Lq=11, form=2), torch.float32)


def test_all_forms_compute_the_same(problem):
    output, grads = StepInForm("fused", *problem, "reference")()
    for form in ("eager", "eager_cast"):
        other_output, other_grads = StepInForm(form, *problem, "reference")()
        torch.testing.assert_close(other_output, output)
        for given, expected in zip(other_grads, grads, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def test_softmax_is_in_float32(monkeypatch):
    """As autocast has it in a training step; cast only where the form says so."""
    seen = {}

    def spy(value, shapes, locations, weights, kernel):
        seen[form] = (locations.dtype, weights.dtype)
        return value.sum() + weights.sum() + locations.sum()

    monkeypatch.setattr("detr.benchmark.ops.fused.ms_deform_attn", spy)
    inputs, grad_output = random_problem(Case(form=2), torch.bfloat16)
    for form in ("eager", "eager_cast"):
        StepInForm(form, inputs, grad_output, "reference").forward()
    assert seen == {"eager": (torch.float32, torch.float32), "eager_cast": (torch.float32, torch.bfloat16)}


def test_the_peer_gets_weights_in_the_dtype_of_value(monkeypatch):
    seen = {}

    def msda(value, sizes, starts, locations, weights, *, backend, fp32acc):
        seen.update(dtypes=(value.dtype, locations.dtype, weights.dtype), starts=starts.tolist(), fp32acc=fp32acc)
        shapes = [tuple(size) for size in sizes.tolist()]
        weights = weights.view(*weights.shape[:3], len(shapes), -1)
        output = ms_deform_attn_reference(value, shapes, locations, weights)
        return output.view(*output.shape[:2], value.shape[2], -1)

    registry = SimpleNamespace(Backend=SimpleNamespace(TRITON="triton"), msda=msda)
    monkeypatch.setitem(sys.modules, "deformops", SimpleNamespace(registry=registry))
    monkeypatch.setitem(sys.modules, "deformops.registry", registry)
    inputs, grad_output = random_problem(Case(form=2), torch.bfloat16)
    output = StepInForm("eager_deformops", inputs, grad_output, "reference").forward()
    torch.testing.assert_close(output, StepInForm("eager_cast", inputs, grad_output, "reference").forward())
    assert seen["dtypes"] == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert seen["starts"][:2] == [0, math.prod(inputs.spatial_shapes[0])]
    assert seen["fp32acc"]


def test_a_missing_peer_is_a_row_with_its_reason(monkeypatch, problem):
    monkeypatch.setitem(sys.modules, "deformops", None)
    monkeypatch.setattr("detr.benchmark.ops.fused.make_fused_inputs", lambda *args, **kwargs: problem)
    row = check_form(OpCase("encoder", 2), "bf16", "cuda", "eager_deformops", seed=0)
    assert row.status.startswith("not run: ")
    assert "deformops" in row.status


def test_saved_storages_are_counted_once():
    x = torch.rand(100, requires_grad=True)
    with recorded_storages() as storages:
        y = x.exp()
        # its result is saved twice, as a whole and in part
        (y * y[:50].sum()).sin()
    sizes = sorted(storage.nbytes() for storage in storages.values())
    # exp's result, the sum, and sin's input
    assert sizes == [4, 400, 400]
    with recorded_storages() as storages, torch.no_grad():
        x.exp()
    assert not storages


def test_a_row_names_its_form_and_backend(problem):
    assert FORMS == ("fused", "eager", "eager_cast", "eager_deformops")
    for form, backend in (("flash", "cuda"), ("fused", "auto")):
        with pytest.raises(ValueError, match=f"a row needs a form of {', '.join(FORMS)} and a named backend"):
            attend_in_form(form, problem[0], backend)


def test_report_holds_the_ratios(tmp_path):
    failed = FusedRow(2, "fp32", "cuda", "fused", "error bound missed: output", verified=False)
    rows = [EAGER, FUSED, failed, replace(EAGER, batch_size=2, dtype="fp32")]
    report = fused_markdown(rows, Origin("T", "python x", "gpu  H", "2026-01-02", "p.png"))
    (line,) = [line for line in report.splitlines() if line.startswith("| eager | 6.600") and "2.20x" in line]
    assert [cell.strip() for cell in line.split("|")][3:9] == ["2.20x", "500.0", "80%", "200.0", "45%", "900"]
    assert "| fused | 3.000 [2.900, 3.100] |  | 400.0 |" in report
    assert "| fused | error bound missed: output |" in report
    # without a fused row there is nothing to compare with
    assert "| eager | 6.600 [6.500, 6.700] |  | 500.0 |  | 200.0 |  | 900 | baseline |" in report
    plot_fused(rows, tmp_path / "a.png", title="T")
    assert (tmp_path / "a.png").stat().st_size > 1000
    write_rows(rows, tmp_path / "a.csv", tmp_path / "a.jsonl")
    with (tmp_path / "a.csv").open() as file:
        assert [row["form"] for row in csv.DictReader(file)] == ["eager", "fused", "fused", "eager"]


def test_times_are_medians():
    row = with_step_times(replace(FUSED, step_ms=None), [3.0, 1.0, 2.0])
    assert (row.step_ms, row.step_p20_ms, row.step_p80_ms) == (2.0, 1.0, 3.0)
