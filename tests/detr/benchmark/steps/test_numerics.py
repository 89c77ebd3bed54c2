"""Verdicts on loss curves."""

import math
import random

import pytest

from detr.benchmark.steps.numerics import compare_curve, noise_level, numerics_report, plot_numerics
from detr.benchmark.steps.row import StepRow


def curve(seed, *, noise=0.01, factor=1.0, steps=50):
    generator = random.Random(seed)
    return tuple(factor * (10 - 0.1 * step) + generator.gauss(0, noise * 10) for step in range(steps))


PLAIN = [curve(seed) for seed in range(3)]


def test_noise_is_how_far_plain_runs_come_apart():
    assert noise_level(PLAIN) == pytest.approx(0.01 * 10 / 7.55 * math.sqrt(1.5), rel=0.3)
    assert noise_level([PLAIN[0], PLAIN[0]]) == 0
    with pytest.raises(ValueError, match=r"two or more plain runs of one length; got lengths \[50\]"):
        noise_level(PLAIN[:1])
    with pytest.raises(ValueError, match=r"got lengths \[50, 49\]"):
        noise_level([PLAIN[0], PLAIN[1][:-1]])


@pytest.mark.parametrize("seed", range(3, 23))
def test_another_run_of_the_same_step_is_within(seed):
    assert compare_curve("same", curve(seed), PLAIN).is_within


@pytest.mark.parametrize(
    "other",
    [
        curve(9, factor=1.05),
        curve(9, noise=0.05),
        (*curve(9)[:-1], 30.0),
        (*curve(9)[:-1], float("nan")),
    ],
    ids=["higher", "noisier", "jump", "nan"],
)
def test_what_trains_otherwise_is_outside(other):
    assert not compare_curve("other", other, PLAIN).is_within


def test_signs():
    result = compare_curve("higher", curve(0, factor=1.1), PLAIN)
    assert result.bias > 0.03
    assert compare_curve("lower", curve(0, factor=0.9), PLAIN).first < -0.05


def test_report(tmp_path):
    names = ["plain", "plain_seed1", "plain_seed2"]
    environment = {"versions": {"torch": "2", "torchvision": None, "triton": None}, "gpus": [], "cpu_count": 2}
    environment |= {"python": "3", "cuda": None, "driver": None, "git": None}

    def row(name, losses, status="ok"):
        return StepRow(name, 0, status, kernel="reference", losses=losses, environment=environment)

    rows = [row(name, losses) for name, losses in zip(names, PLAIN, strict=True)]
    rows += [row("good", curve(7)), row("wrong", curve(7, factor=1.2)), row("broken", (), "failed: no GPU")]
    report = numerics_report(
        rows,
        plain_names=names,
        notes={"good": "other masks"},
        title="Numerics",
        command="command",
        picture="report.png",
    )
    cells = {line.split(" | ")[0].strip("| "): line for line in report.splitlines() if line.startswith("| ")}
    assert "within noise | other masks |" in cells["good"]
    assert "**outside**" in cells["wrong"]
    assert "no GPU" in cells["broken"]
    assert "| plain |" in cells["plain_seed1"]
    plot_numerics(rows, tmp_path / "report.png", plain_names=names, title="Numerics")
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert "its noise is not known" in numerics_report(
        rows[:1], plain_names=names, notes={}, title="Numerics", command="command", picture="report.png"
    )
