import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.engine.checkpoint import load_checkpoint
from detr.engine.interval import steps_per_epoch, windows
from detr.engine.preemption import Preempted
from detr.engine.restore import Progress
from detr.engine.settings import TrainerSettings
from detr.engine.training_clock import TrainingClock
from detr.telemetry.loggers import CompositeLogger, JsonlLogger, read_metrics


class Interrupt(Exception):
    """Stands for a kill."""


class KillAt:
    """A logger that dies at a step, after the checkpoint of the epoch before."""

    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.step and "train/loss" in values:
            raise Interrupt

    def close(self) -> None:
        pass


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


def test_two_and_two_epochs_equal_four_bit_for_bit(
    trainer: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
):
    # two steps an epoch, dropout and an average on, the rate cut after epoch 2
    trainer(tmp_path / "whole").fit()
    log = JsonlLogger(tmp_path / "broken" / "metrics.jsonl")
    with pytest.raises(Interrupt):
        trainer(tmp_path / "broken", logger=CompositeLogger([log, KillAt(step=6)])).fit()
    broken = load_checkpoint(tmp_path / "broken" / "last.pt")
    assert (broken.epoch, broken.global_step) == (2, 4)
    torch.manual_seed(99)
    continued = trainer(tmp_path / "broken")
    continued.fit()
    whole, other = (load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "broken"))
    assert whole.epoch == 4
    for field in ("model", "ema", "optimizer", "schedule", "random_states", "metrics", "global_step", "best"):
        assert_same(getattr(whole, field), getattr(other, field), field)
    assert continued.state.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    steps = [[row["step"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "broken")]
    assert steps[0] == steps[1] == list(range(1, 9))


def test_the_run_folder_holds_what_a_run_leaves(plots: None, trainer: Callable[..., Any], tmp_path: Path):
    metrics = trainer(tmp_path, epochs=2, keep_last=2).fit()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "ap.png",
        "best.pt",
        "config.yaml",
        "environment.json",
        "last.pt",
        "loss.png",
        "metrics.json",
        "metrics.jsonl",
        "step_00000002.pt",
        "step_00000004.pt",
    }
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == metrics
    assert list(written)[:3] == ["AP", "AP50", "AP75"]
    assert set(written["per_class"]) == set(load_checkpoint(tmp_path / "last.pt").class_table.names)


def test_every_step_is_logged_with_all_terms(trainer: Callable[..., Any], tmp_path: Path):
    trainer(tmp_path, epochs=2).fit()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        for name in ("loss", "loss_ce", "loss_giou_0", "grad_norm", "lr", "images_per_s", "skipped"):
            assert f"train/{name}" in row
    assert "val/AP" in rows[1]
    assert "val/AP" not in rows[0]


def test_cadences(trainer: Callable[..., Any], tmp_path: Path):
    trainer(tmp_path, epochs=5, eval_every=2, save_every=100, keep_last=2).fit()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["epoch"] for row in rows if "val/AP" in row] == [2, 4, 5]
    # two steps an epoch
    assert sorted(path.name for path in tmp_path.glob("step_*.pt")) == ["step_00000008.pt", "step_00000010.pt"]


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


def test_a_finished_run_is_left_as_it_is(trainer: Callable[..., Any], tmp_path: Path):
    metrics = trainer(tmp_path, epochs=1).fit()
    before = (tmp_path / "last.pt").stat().st_mtime_ns
    assert trainer(tmp_path, epochs=1).fit() == metrics
    assert (tmp_path / "last.pt").stat().st_mtime_ns == before


def test_best_is_the_best_and_last_the_last(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from dataclasses import replace

    from detr.engine import trainer as module

    real = module.evaluate
    scores = iter([0.1, 0.5, 0.3])
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: replace(real(*a, **k), AP=next(scores)))
    trainer(tmp_path, epochs=3).fit()
    best, last = load_checkpoint(tmp_path / "best.pt"), load_checkpoint(tmp_path / "last.pt")
    assert (best.epoch, best.best) == (2, {"epoch": 2, "AP": 0.5})
    assert (last.epoch, last.best) == (3, {"epoch": 2, "AP": 0.5})


def test_a_run_that_learns_nothing_gets_a_checklist(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from detr.engine import progress_checks

    monkeypatch.setattr(progress_checks, "STUCK_EPOCHS", 2)
    trainer(tmp_path, epochs=2).fit()
    [warning] = [record.message for record in caplog.records if "AP is at most" in record.message]
    assert "after 2 epochs" in warning
    assert "optimizer.lr" in warning


@pytest.mark.parametrize("is_judged", [True, False])
def test_an_epoch_without_a_finite_step_is_the_end_unless_it_is_short(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_judged: bool
):
    from detr.engine import progress_checks

    monkeypatch.setattr(progress_checks, "LEAST_STEPS_TO_JUDGE", 2 if is_judged else 3)
    run = trainer(tmp_path, ema_decay=None, epochs=1)
    run.state.detector.level_embed.register_hook(lambda gradient: gradient * float("nan"))
    if not is_judged:
        run.fit()
        return
    with pytest.raises(FloatingPointError, match="none of the 2 steps of epoch 1"):
        run.fit()
    assert not (tmp_path / "last.pt").exists()


def test_resuming_on_other_classes_is_refused(trainer: Callable[..., Any], data: Callable[..., Any], tmp_path: Path):
    from dataclasses import replace

    from detr.engine.checkpoint import save_checkpoint
    from detr.structures import ClassTable

    trainer(tmp_path, epochs=1).fit()
    checkpoint = load_checkpoint(tmp_path / "last.pt")
    renamed = ClassTable(("cat", *checkpoint.class_table.names[1:]), checkpoint.class_table.category_ids)
    save_checkpoint(replace(checkpoint, class_table=renamed), tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"(?s)cat.*init_from"):
        trainer(tmp_path, epochs=1)


def test_windows_lose_no_batch():
    assert list(windows(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]  # type: ignore[arg-type]


def test_steps_of_an_epoch_count_the_rest(data: Callable[..., Any]):
    loader = data(batch_size=2, num_train_images=11).train_loader(seed=0)
    assert len(loader) == 5
    assert steps_per_epoch(loader, 2) == 3


@pytest.mark.parametrize("name", ["profile_steps", "num_pictures"])
def test_settings_that_may_be_zero_name_the_key(name: str):
    with pytest.raises(ValueError, match=f"trainer.{name} must be a whole number, 0 for none; got -1"):
        TrainerSettings(**{name: -1})


@pytest.mark.parametrize("name", ["accumulate", "log_every", "eval_every", "save_every", "keep_last"])
def test_settings_out_of_range_name_the_key(name: str):
    with pytest.raises(ValueError, match=f"trainer.{name} must be at least 1, a whole number; got 0"):
        TrainerSettings(**{name: 0})


def test_every_epoch_has_an_order_of_its_own(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = trainer(tmp_path / "run", epochs=3)
    epochs = []
    set_epoch = run.train_loader.set_epoch
    monkeypatch.setattr(
        run.train_loader, "set_epoch", lambda epoch, start: epochs.append(epoch) or set_epoch(epoch, start=start)
    )
    run.fit()
    assert epochs == [0, 1, 2]


def test_the_averaged_copy_is_what_is_evaluated(trainer: Callable[..., Any], tmp_path: Path):
    averaged, plain = trainer(tmp_path / "averaged"), trainer(tmp_path / "plain", ema_decay=None)
    assert averaged.state.evaluated is averaged.state.ema.module
    assert averaged.state.evaluated is not averaged.state.detector
    assert plain.state.evaluated is plain.state.detector


def test_an_evaluation_that_fails_costs_no_epoch(
    assert_same: Callable[..., None], trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = trainer(tmp_path / "run", epochs=2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("a validation image is truncated")

    with monkeypatch.context() as patch:
        patch.setattr("detr.engine.trainer.evaluate", fail)
        with pytest.raises(OSError, match="truncated"):
            run.fit()
    saved = load_checkpoint(tmp_path / "run" / "last.pt")
    assert (saved.epoch, saved.metrics) == (1, {})
    # the evaluation is made up for, and the result is that of a run that never failed
    trainer(tmp_path / "run", epochs=2).fit()
    trainer(tmp_path / "whole", epochs=2).fit()
    again, whole = (load_checkpoint(tmp_path / name / "last.pt") for name in ("run", "whole"))
    assert_same(again.model, whole.model)
    assert again.best == whole.best
    assert (tmp_path / "run" / "best.pt").exists()


def test_a_run_killed_while_saving_its_best_ends_with_a_best(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(source: Path, target: Path) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr("detr.engine.checkpoint_writer.copy_file", die)
        with pytest.raises(Interrupt):
            trainer(tmp_path / "run", epochs=1).fit()
    trainer(tmp_path / "run", epochs=1).fit()
    last, best = (load_checkpoint(tmp_path / "run" / name) for name in ("last.pt", "best.pt"))
    assert last.best["epoch"] == best.epoch == 1


def test_the_log_of_a_start_without_a_checkpoint_is_set_aside(trainer: Callable[..., Any], tmp_path: Path):
    log = JsonlLogger(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(Interrupt):
        trainer(tmp_path / "run", logger=CompositeLogger([log, KillAt(step=1)])).fit()
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    trainer(tmp_path / "run", epochs=1).fit()
    assert (tmp_path / "run" / "interrupted_metrics.jsonl").exists()
