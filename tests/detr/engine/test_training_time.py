"""The clock of a run: its time limit, and evaluations by the minute."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from detr.engine.checkpoint import load_checkpoint
from detr.engine.preemption import Preempted
from detr.engine.restore import Progress
from detr.engine.settings import TrainerSettings
from detr.engine.training_clock import TrainingClock
from detr.telemetry.loggers import read_metrics


class Interrupt(Exception):
    """Stands for a kill."""


class TwoSecondsAStep:
    """A clock that goes by steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @property
    def seconds(self) -> float:
        return 2.0 * self._progress.global_step

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def passed(self, every_minutes: float) -> bool:
        return self.seconds % (60 * every_minutes) == 0


def test_the_clock_adds_up_sittings_and_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr("detr.engine.training_clock.time.perf_counter", lambda: now_s)
    clock = TrainingClock(30.0)
    with clock.running():
        now_s += 60
        assert clock.seconds == 90
    now_s += 1000
    assert clock.minutes == 1.5
    clock = TrainingClock(96.0 - 6.0)
    with clock.running():
        now_s += 25
        assert clock.passed(1.0) is False
        now_s += 10
        with clock.paused():
            now_s += 500
        assert clock.seconds == 125
        assert clock.passed(1.0) is True
        assert clock.passed(1.0) is False
    clock = TrainingClock(90.0)
    killed = clock.running()
    killed.__enter__()
    now_s += 6
    assert not killed.__exit__(Interrupt, Interrupt(), None)
    assert clock.seconds == 96


def test_a_run_ends_when_its_time_is_up_and_goes_on_with_more(
    trainer: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
):
    def run(name: str, **settings: Any) -> Any:
        made = trainer(tmp_path / name, **settings)
        made.clock = TwoSecondsAStep(made.progress)
        return made

    metrics = run("run", max_minutes=5 / 60).fit()
    stopped = load_checkpoint(tmp_path / "run" / "last.pt")
    # two steps an epoch: the third step takes it beyond five seconds
    assert (stopped.global_step, stopped.epoch, stopped.epoch_samples, stopped.train_s) == (3, 1, 4, 6.0)
    assert stopped.metrics == metrics
    assert "val/AP" in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]

    again = run("run", max_minutes=5 / 60)
    assert again.fit() == metrics
    assert again.progress.global_step == 3
    run("run").fit()
    run("whole").fit()
    whole, other = (load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "run"))
    for field in ("model", "ema", "optimizer", "metrics", "global_step"):
        assert_same(getattr(whole, field), getattr(other, field), field)
    minutes = [row["train/minutes"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert minutes == pytest.approx([2 * step / 60 for step in range(1, 9)])


def test_evaluations_by_the_minute_leave_training_as_it_is(
    trainer: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
):
    def run(name: str, **settings: Any) -> Any:
        made = trainer(tmp_path / name, epochs=2, eval_every=2, **settings)
        made.clock = TwoSecondsAStep(made.progress)
        made.fit()

    run("often", eval_every_minutes=2 / 60)
    run("seldom")
    evaluated = [
        [row["step"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "val/AP" in row]
        for name in ("often", "seldom")
    ]
    # the last step's comes with the end of the epoch as well
    assert evaluated == [[1, 2, 3, 4], [4]]
    often, seldom = (load_checkpoint(tmp_path / name / "last.pt") for name in ("often", "seldom"))
    for field in ("model", "ema", "optimizer", "random_states", "metrics"):
        assert_same(getattr(often, field), getattr(seldom, field), field)


def test_a_signal_during_an_evaluation_by_the_minute_costs_no_step(
    trainer: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
):
    def run(name: str) -> Any:
        made = trainer(tmp_path / name, epochs=2, eval_every=2, eval_every_minutes=6 / 60)
        made.clock = TwoSecondsAStep(made.progress)
        return made

    stopped = run("stopped")
    save = stopped._save

    def save_and_ask(is_best: bool) -> None:
        save(is_best)
        # the checkpoint before the evaluation of step 3
        stopped.stop.requested = stopped.progress.global_step == 3

    stopped._save = save_and_ask
    with pytest.raises(Preempted, match="goes on from there"):
        stopped.fit()
    assert load_checkpoint(tmp_path / "stopped" / "last.pt").global_step == 3
    run("stopped").fit()
    run("whole").fit()
    whole, other = (load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "stopped"))
    for field in ("model", "ema", "optimizer", "metrics", "global_step"):
        assert_same(getattr(whole, field), getattr(other, field), field)


def test_an_evaluation_that_the_time_limit_missed_is_made_up_for(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from detr.engine import trainer as module

    real = module.evaluate

    def fail(*args: Any, **keywords: Any) -> None:
        raise Interrupt

    monkeypatch.setattr(module, "evaluate", fail)
    with pytest.raises(Interrupt):
        trainer(tmp_path, max_minutes=1e-6).fit()
    stopped = load_checkpoint(tmp_path / "last.pt")
    assert (stopped.global_step, stopped.metrics) == (1, {})
    monkeypatch.setattr(module, "evaluate", real)
    assert "AP" in trainer(tmp_path, max_minutes=1e-6).fit()
    assert load_checkpoint(tmp_path / "last.pt").global_step == 1


def test_the_end_of_the_time_is_evaluated_also_when_an_older_evaluation_is_known(
    trainer: Callable[..., Any], tmp_path: Path
):
    """A checkpoint between two logs may be past the limit, with the numbers of earlier weights."""
    whole = trainer(tmp_path, epochs=3)
    whole.clock = TwoSecondsAStep(whole.progress)
    save = whole._save

    def save_and_ask(is_best: bool) -> None:
        save(is_best)
        # after the evaluation of the first epoch
        if whole.progress.metrics:
            whole.stop.requested = True

    whole._save = save_and_ask
    with pytest.raises(Preempted):
        whole.fit()
    stopped = load_checkpoint(tmp_path / "last.pt")
    assert (stopped.global_step, stopped.metrics) == (3, {})

    again = trainer(tmp_path, epochs=3, max_minutes=1 / 60)
    assert "AP" in again.fit()
    assert again.progress.global_step == 3
    evaluated = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "val/AP" in row]
    assert evaluated == [2, 3]


@pytest.mark.parametrize("name", ["max_minutes", "eval_every_minutes", "hang_s", "clip"])
@pytest.mark.parametrize("value", ["abc", "", 0, -1, float("nan")])
def test_a_limit_that_is_no_positive_number_is_refused(name: str, value: Any):
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"trainer.{name} must be positive, or null"):
        TrainerSettings(**settings)
