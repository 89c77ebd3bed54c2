"""The tools as a user runs them, in this process, from a folder of their own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from tools import (
    analyze,
    benchmark,
    check_dataset,
    compare_accuracy,
    compare_gradients,
    compare_runs,
    evaluate,
    import_weights,
    inspect_attention,
    predict,
    train,
)

MAINS = {
    "train": train.main,
    "analyze": analyze.main,
    "evaluate": evaluate.main,
    "predict": predict.main,
    "check_dataset": check_dataset.main,
    "import_weights": import_weights.main,
    "inspect_attention": inspect_attention.main,
    "benchmark": benchmark.main,
    "compare_accuracy": compare_accuracy.main,
    "compare_gradients": compare_gradients.main,
    "compare_runs": compare_runs.main,
}

# seconds an epoch on one core; the AP means nothing
TINY = (
    "experiment=debug_cpu",
    "data.size=64",
    "data.num_train_images=8",
    "data.num_val_images=4",
    "schedule.epochs=1",
)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a tool in `tmp_path`; returns what it printed, and raises SystemExit where it exits with an error."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)

    def run(name: str, *overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"tools/{name}.py", *overrides])
        GlobalHydra.instance().clear()
        capfd.readouterr()
        MAINS[name]()
        return capfd.readouterr().out

    return run


@pytest.fixture
def refused(tool: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a tool that must exit with 1; returns its error message."""

    def run(name: str, *overrides: str) -> str:
        with pytest.raises(SystemExit) as stop:
            tool(name, *overrides)
        assert stop.value.code == 1
        message = capfd.readouterr().err
        assert "Traceback" not in message
        return message

    return run


@pytest.fixture
def tiny() -> tuple[str, ...]:
    return TINY
