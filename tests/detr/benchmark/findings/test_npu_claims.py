"""The NPU paper's claims without a GPU: ratios, bases, verdicts and the report."""

from dataclasses import replace

import pytest

from detr.benchmark.findings.npu_claims import CLAIMED, Ratios, TechniqueRow, base_of, ratios, technique_of
from detr.benchmark.findings.npu_claims_report import (
    VENDOR,
    markdown,
    of_base,
    plot,
    ratio_verdict,
    technique_verdicts,
)
from detr.benchmark.findings.point_kernels import Technique
from detr.benchmark.ops.row import OpRow
from detr.benchmark.origin import Origin

ORIGIN = Origin("T", "python x", "gpu  H", "2026-01-02", "p.png")
PLAIN = OpRow(
    "encoder", 8, 1.5, "bf16", "grid_sample", "float32", False, "ok", None, forward_ms=12.0, forward_grad_ms=14.0,
    backward_ms=36.0,
)  # fmt: skip
CUDA = replace(PLAIN, backend="cuda", verified=True, forward_ms=1.0, forward_grad_ms=2.0, backward_ms=3.0)
BASE = TechniqueRow("forward", "bf16", 2, "plain", "plain", "ok", True, 1.0, 0.9, 1.1, 0.1)
PADDED = replace(BASE, technique="padded", kernel_ms=0.8)


def test_ratios_by_hand():
    assert ratios(CUDA, PLAIN) == Ratios(12.0, 12.0, 10.0)
    assert ratios(replace(CUDA, backward_ms=None), PLAIN) is None
    assert Ratios(5.9, 8.9, 7.3) == CLAIMED


def test_a_technique_is_compared_with_what_it_adds_to():
    assert base_of(Technique(head_major=True, pair=True)) == Technique(head_major=True)
    for technique in (Technique(padded=True), Technique(staged=True), Technique(head_major=True), Technique()):
        assert base_of(technique) == Technique()
    assert base_of(Technique(head_major=True, pair=True, padded=True)) == Technique()


def test_an_unknown_switch_is_refused():
    assert technique_of({"staged": True}) == Technique(staged=True)
    with pytest.raises(ValueError, match=r"a technique has the switches head_major, .*; got \['tiled'\]"):
        technique_of({"tiled": True})


def test_ratio_verdict_is_of_the_worst_workload():
    assert ratio_verdict([PLAIN, CUDA]).startswith("reproduced: cuda is at least 12.0x / 12.0x / 10.0x")
    slow = [replace(PLAIN, dtype="fp32"), replace(CUDA, dtype="fp32", forward_ms=4.0)]
    assert ratio_verdict([PLAIN, CUDA, *slow]).startswith("different: cuda is at least 3.0x / 12.0x")
    assert ratio_verdict([PLAIN, replace(CUDA, forward_ms=None)]) == "open: a row is missing"
    assert ratio_verdict([PLAIN]) == "open: a row is missing"


@pytest.mark.parametrize(
    ("bf16", "fp32", "word"),
    [(0.8, 0.9, "carries over"), (1.2, 1.1, "costs time"), (1.0, 1.01, "changes nothing"), (0.8, 1.2, "depends on")],
)
def test_technique_verdicts(bf16, fp32, word):
    rows = [BASE, replace(PADDED, kernel_ms=bf16), replace(BASE, dtype="fp32")]
    rows += [replace(PADDED, dtype="fp32", kernel_ms=fp32)]
    (line,) = technique_verdicts(rows)
    assert line.startswith(f"forward padded: {word}")
    assert f"bf16 {bf16:.2f}x, fp32 {fp32:.2f}x the time of plain" in line


def test_without_times_a_technique_is_open():
    assert technique_verdicts([BASE, replace(PADDED, kernel_ms=None)]) == ["forward padded: open"]
    assert of_base(BASE, [BASE]) is None
    assert of_base(PADDED, [replace(BASE, dtype="fp32")]) is None


def test_report(tmp_path):
    failed = replace(PADDED, technique="staged", status="error bound missed: output", kernel_ms=None, verified=False)
    text = markdown([PLAIN, CUDA], [BASE, PADDED, failed], ORIGIN)
    assert "| cuda float32 | 1.0000 | 3.0000 | 12.0 | 12.0 | 10.0 | passed |" in text
    assert "| forward | bf16 | padded | 0.8000 [0.9000, 1.1000] | 0.80 | plain | 0.1000 | passed |" in text
    assert "| forward | bf16 | staged | error bound missed: output |" in text
    assert VENDOR in text
    plot([BASE, PADDED, failed], tmp_path / "p.png", title="T")
    assert (tmp_path / "p.png").stat().st_size > 1000
