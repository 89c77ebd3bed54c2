"""Ranks exchanged for accumulated batches, with as many images a step: the same run, also from within an epoch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.run_folder import open_run_folder

WORKER = Path(__file__).with_name("exchanged_ranks.py")
# of six steps: four of twelve images into the second epoch, behind the cut of the rate
STOP_AFTER = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., Any]) -> Path:
    """A folder with those of one rank and of two, and of each the first half, which the other went on from."""
    folder = tmp_path_factory.mktemp("exchanged")
    for ranks, parts in (
        (1, ["one", f"one_half:{STOP_AFTER}"]),
        (2, ["two", "one_two<one_half", f"two_half:{STOP_AFTER}"]),
        (1, ["two_one<two_half"]),
    ):
        finished = run_script(WORKER, str(folder), *parts, ranks=ranks, timeout_s=240)
        (folder / f"{parts[0]}.log").write_text(finished.stdout + finished.stderr)
    return folder


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All that training has made: weights, their average, and both moments."""
    assert checkpoint.ema is not None
    moments = checkpoint.optimizer["state"]
    return {
        **{f"model.{name}": tensor for name, tensor in checkpoint.model.items()},
        **{f"ema.{name}": tensor for name, tensor in checkpoint.ema.items()},
        **{f"{name} {number}": value for number, kept in moments.items() for name, value in kept.items()},
    }


@pytest.mark.parametrize("name", ["two", "one_two", "two_one"])
def test_it_is_the_same_run(runs: Path, name: str):
    one, other = (load_checkpoint(runs / each / "last.pt") for each in ("one", name))
    for field in ("epoch", "global_step", "epoch_samples", "schedule"):
        assert getattr(other, field) == getattr(one, field), field
    assert (one.epoch, one.global_step) == (2, 6)
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["one_half", "two_half"])
def test_it_is_stopped_within_an_epoch(runs: Path, name: str):
    half = load_checkpoint(runs / name / "last.pt")
    assert (half.epoch, half.global_step, half.epoch_samples) == (1, STOP_AFTER, 4)
    # and has trained: what goes on from it does not start anew
    start, end = (load_checkpoint(runs / each / "last.pt").model for each in (name, "one"))
    assert any(not torch.equal(start[key], end[key]) for key in start)


def test_the_same_command_with_other_batches_is_refused_with_what_goes_on(runs: Path):
    config = {"trainer": {"accumulate": 2}, "data": {"batch_size": 1}}
    with pytest.raises(ValueError, match=r"(?s)trainer.accumulate: 4 -> 2.*resume=.*one_half/last.pt to go on"):
        open_run_folder(runs / "one_half", config, resume="auto")
