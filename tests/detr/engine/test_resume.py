"""A run that stops within an epoch, by a kill or a signal, ends as if it had not."""

import copy
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.distributed import DistributedContext
from detr.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from detr.engine.preemption import Preempted, StopRequest
from detr.engine.restore import restore, resume
from detr.engine.step import train_step
from detr.models.frozen_norm import FrozenBatchNorm
from detr.telemetry.loggers import CompositeLogger, JsonlLogger, read_metrics

# all that decides how a run goes on
STATE = ("model", "ema", "optimizer", "schedule", "scaler", "random_states", "epoch", "epoch_samples", "global_step")


class AtStep:
    """A logger that acts when a step is logged, before it is saved."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step = step
        self.act = act

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.step and "train/loss" in values:
            self.act()

    def close(self) -> None:
        pass


class Killed(Exception):
    """Stands for a kill."""


def kill() -> None:
    raise Killed


@pytest.fixture
def assert_same_end(assert_same: Callable[..., None]) -> Callable[[Path, Path], None]:
    def check(first: Path, second: Path) -> None:
        one, other = (load_checkpoint(path / "last.pt") for path in (first, second))
        for field in (*STATE, "metrics", "best"):
            assert_same(getattr(one, field), getattr(other, field), field)

    return check


@pytest.fixture(scope="module")
def start(trainer: Callable[..., Any], data: Callable[..., Any]) -> Callable[..., Any]:
    """A run of two epochs with six batches of two images each: three steps an epoch, accumulating two batches."""

    def make(path: Path, **options: Any) -> Any:
        settings = {"epochs": 2, "eval_every": 2, "save_every_steps": 1, "data": data(num_train_images=13)}
        return trainer(path, **(settings | options))

    return make


@pytest.fixture(scope="module")
def whole(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stops."""
    path = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("detr.engine.trainer.plot_curves", lambda metrics_log, folder: None)
        start(path).fit()
    return path


@pytest.mark.parametrize(("step", "every"), [(2, 1), (3, 1), (4, 1), (6, 1), (6, 2)])
def test_killed_within_an_epoch(
    start: Callable[..., Any],
    assert_same_end: Callable[[Path, Path], None],
    whole: Path,
    tmp_path: Path,
    step: int,
    every: int,
):
    path = tmp_path / "run"
    logger = CompositeLogger([JsonlLogger(path / "metrics.jsonl"), AtStep(step, kill)])
    with pytest.raises(Killed):
        start(path, logger=logger, save_every_steps=every).fit()
    # three steps an epoch, and the end of an epoch is saved whatever the cadence
    saved = max((step - 1) // every * every, (step - 1) // 3 * 3)
    checkpoint = load_checkpoint(path / "last.pt")
    assert (checkpoint.global_step, checkpoint.epoch, checkpoint.epoch_samples) == (saved, saved // 3, saved % 3 * 4)
    torch.manual_seed(99)
    start(path, save_every_steps=every).fit()
    assert_same_end(path, whole)
    assert [row["step"] for row in read_metrics(path / "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_within_a_step(
    start: Callable[..., Any],
    assert_same_end: Callable[[Path, Path], None],
    whole: Path,
    tmp_path: Path,
    number: signal.Signals,
):
    path = tmp_path / "run"
    handlers = signal.getsignal(number)

    def ask() -> None:
        # torchrun hands on what the scheduler sends to everyone: both count as one
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    logger = CompositeLogger([JsonlLogger(path / "metrics.jsonl"), AtStep(4, ask)])
    with pytest.raises(Preempted, match="after step 5"):
        start(path, logger=logger, save_every_steps=None).fit()
    assert signal.getsignal(number) == handlers
    checkpoint = load_checkpoint(path / "last.pt")
    assert (checkpoint.global_step, checkpoint.epoch, checkpoint.epoch_samples) == (5, 1, 8)
    start(path, save_every_steps=None).fit()
    assert_same_end(path, whole)


def test_a_signal_during_evaluation_costs_nothing(
    start: Callable[..., Any], assert_same_end: Callable[[Path, Path], None], whole: Path, tmp_path: Path
):
    path = tmp_path / "run"
    run = start(path, save_every_steps=None)
    save = run.writer.save

    def save_then_ask(checkpoint: Checkpoint, *, is_best: bool) -> None:
        save(checkpoint, is_best=is_best)
        if checkpoint.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run.writer.save = save_then_ask
    with pytest.raises(Preempted, match="while it evaluated"):
        run.fit()
    assert load_checkpoint(path / "last.pt").metrics == {}
    start(path, save_every_steps=None).fit()
    assert_same_end(path, whole)


def test_a_later_second_signal_ends_the_process_as_it_always_would(monkeypatch: pytest.MonkeyPatch):
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr("detr.engine.preemption._SAME_REQUEST_S", 0.0)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert raised == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert raised == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_ranks_go_on_at_the_same_images_and_say_what_changes(
    train_state: Callable[..., Any],
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    # four images into epoch 2 on two ranks, each of which draws numbers of its own
    checkpoint = load_checkpoint(sorted(whole.glob("step_*.pt"))[0])
    assert checkpoint.global_step == 5
    states = checkpoint.random_states * 2
    save_checkpoint(replace(checkpoint, random_states=states, epoch_samples=4), tmp_path / "two.pt")
    context = DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    state = train_state(steps=6, ema_decay=0.9)
    progress = resume(state, tmp_path / "two.pt", class_table=checkpoint.class_table, context=context, config={"a": 1})
    assert (progress.epoch, progress.epoch_samples) == (1, 4)
    [settings, ranks] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "a: (absent) -> 1" in settings
    assert "ranks 1 instead of 2, steps an epoch 6 instead of 3" in ranks
    assert "Each image of the epoch is still seen once, with the same augmentation" in ranks
    # four batches of the second epoch are left: the rates fall where the epochs end, whatever the pace was
    state.schedule.seek(1, 4)
    assert state.schedule.num_steps == 8


@pytest.mark.parametrize(("num_images", "num_steps_left"), [(4, 0), (12, 1), (16, 2)])
def test_a_dataset_that_changed_is_said_and_gone_on_with(
    trainer: Callable[..., Any],
    data: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_images: int,
    num_steps_left: int,
):
    """Eight of twelve images into the second epoch; with four images, that is beyond its end."""
    run = trainer(tmp_path / "run", epochs=2, data=data(num_train_images=12), save_every_steps=1)

    def die() -> None:
        raise RuntimeError("killed")

    run.logger = CompositeLogger([run.logger, AtStep(6, die)])
    with pytest.raises(RuntimeError, match="killed"):
        run.fit()
    saved = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (saved.epoch, saved.epoch_samples, saved.global_step) == (1, 8, 5)
    caplog.clear()
    again = trainer(tmp_path / "run", epochs=2, data=data(num_train_images=num_images))
    said = [record.message for record in caplog.records if "the dataset is not the one" in record.message]
    assert len(said) == (num_images != 12)
    assert all("train: 12 images, shapes" in line and f" -> {num_images} images" in line for line in said)
    again.fit()
    assert again.progress.epoch == 2
    assert again.progress.global_step == 5 + num_steps_left


def test_a_rank_that_does_not_see_the_checkpoint_says_so(
    train_state: Callable[..., Any], data: Callable[..., Any], tmp_path: Path
):
    context = DistributedContext(rank=9, local_rank=1, world_size=16, device=torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match=r"rank 9 does not see .*last\.pt.* all of them share"):
        resume(train_state(), tmp_path / "last.pt", class_table=data().class_table, context=context)


@pytest.mark.parametrize("fused", [True, False])
def test_moments_in_another_memory_format_go_on_as_if_saved_in_the_parameters_own(
    train_state: Callable[..., Any], batches: Callable[..., Any], checkpoint: Checkpoint, *, fused: bool
):
    # a checkpoint from a GPU, or of a version without channels last, holds plain contiguous moments
    window = batches([(2, 1)])
    whole, resumed = train_state(fused=fused), train_state(fused=fused)
    for module in (*whole.detector.modules(), *resumed.detector.modules()):
        if isinstance(module, FrozenBatchNorm):
            # timm starts the last norm of a block at zero; frozen there, no convolution before it would train
            module.weight.fill_(1)
    train_step(whole, window)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    for moments in saved["state"].values():
        for name, value in moments.items():
            moments[name] = value.clone(memory_format=torch.contiguous_format)
    saved = replace(
        checkpoint,
        model={name: tensor.clone() for name, tensor in whole.detector.state_dict().items()},
        optimizer=saved,
        schedule=whole.schedule.state_dict(),
    )
    restore(resumed, saved, source="a test")
    num_turned = 0
    for parameter, moments in resumed.optimizer.state.items():
        # as the optimizer makes them itself
        own = torch.zeros_like(parameter, memory_format=torch.preserve_format).stride()
        assert moments["exp_avg"].stride() == moments["exp_avg_sq"].stride() == own
        num_turned += not parameter.is_contiguous() and bool(moments["exp_avg"].any())
    assert num_turned > 0
    for state in (whole, resumed):
        train_step(state, window)
    for (name, expected), mine in zip(whole.detector.named_parameters(), resumed.detector.parameters(), strict=True):
        assert torch.equal(mine, expected), name
