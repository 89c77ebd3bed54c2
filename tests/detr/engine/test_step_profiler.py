"""The profile that a training run leaves."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.engine.step_profiler import KERNELS, TRACE, StepProfiler
from detr.engine.trainer import TrainerSettings

CPU = torch.device("cpu")


def test_the_steps_after_the_warm_up_are_written_once(tmp_path: Path):
    profiler = StepProfiler(CPU, tmp_path, num_steps=2, num_warmup=3)
    matrix = torch.rand(64, 64)
    profiler.start()
    for step in range(7):
        if step < 3:
            torch.cos(matrix)
        elif step < 5:
            for _ in range(5):
                matrix @ matrix
        else:
            torch.sin(matrix)
        profiler.step()
    profiler.close()
    rows = {
        cells[1].strip(" `"): cells[2:5]
        for line in (tmp_path / KERNELS).read_text().splitlines()
        if len(cells := line.split("|")) > 5
    }
    # five products in each of the two steps; nothing of the warm-up and of what came after
    assert float(rows["aten::mm"][2]) == 5
    assert not {"aten::cos", "aten::sin"} & rows.keys()
    assert rows["all"][1].strip() == "100.0%"
    with gzip.open(tmp_path / TRACE, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names


def test_a_run_writes_its_profile_and_trains_alike(trainer: Callable[..., Any], tmp_path: Path, monkeypatch):
    from detr.engine import trainer as module

    def short(*arguments: Any, num_steps: int) -> StepProfiler:
        return StepProfiler(*arguments, num_steps=num_steps, num_warmup=1)

    monkeypatch.setattr(module, "StepProfiler", short)
    metrics = trainer(tmp_path / "profiled", epochs=2, profile_steps=2).fit()
    assert metrics == trainer(tmp_path / "plain", epochs=2).fit()
    assert "aten::" in (tmp_path / "profiled" / KERNELS).read_text()
    assert (tmp_path / "profiled" / TRACE).stat().st_size > 1000
    assert not (tmp_path / "plain" / KERNELS).exists()


def test_a_run_that_is_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    profiler = StepProfiler(CPU, tmp_path, num_steps=2)
    profiler.start()
    profiler.step()
    with caplog.at_level(logging.WARNING):
        profiler.close()
    assert "nothing was profiled, since the run had 1 steps" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [-1, 1.5])
def test_the_number_of_steps_is_checked(value: float):
    with pytest.raises(ValueError, match="profile_steps must be a whole number"):
        TrainerSettings(profile_steps=value)  # type: ignore[arg-type]
