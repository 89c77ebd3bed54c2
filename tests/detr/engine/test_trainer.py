import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detr.engine.checkpoint import load_checkpoint
from detr.engine.interval import steps_left, steps_per_epoch, windows
from detr.engine.run_checkpoint import run_checkpoint
from detr.engine.settings import TrainerSettings
from detr.engine.trainer import Trainer
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
    trainer(tmp_path, epochs=3).fit()
    [warning] = [record.message for record in caplog.records if "AP is at most" in record.message]
    assert "after 2 epochs" in warning
    assert "optimizer.lr" in warning


def test_one_rank_speaks_for_all_of_what_all_know(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from detr.engine import progress_checks

    monkeypatch.setattr(progress_checks, "STUCK_EPOCHS", 0)
    monkeypatch.setattr("detr.engine.trainer.is_main", lambda: False)
    trainer(tmp_path, epochs=1).fit()
    assert not [record.message for record in caplog.records if "AP is at most" in record.message]


@pytest.mark.parametrize(("ap", "says"), [(-1.0, "AP cannot be measured"), (0.0, "AP is at most"), (0.5, "")])
def test_what_a_run_says_about_its_ap(ap: float, says: str, caplog: pytest.LogCaptureFixture):
    """-1 is COCO's word for no ground truth, and no bad AP."""
    from detr.engine.progress_checks import StuckWarning

    warning = StuckWarning()
    for epoch in (8, 9):
        warning.check(ap, epoch=epoch, num_epochs=9)
    assert [record.message[: len(says)] for record in caplog.records] == ([says] if says else [])


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


@pytest.mark.parametrize(
    ("epoch", "epoch_samples", "left"), [(0, 0, 12), (1, 0, 9), (1, 4, 8), (3, 8, 1), (3, 11, 0), (3, 99, 0), (4, 0, 0)]
)
def test_steps_to_the_end_count_from_within_an_epoch(
    data: Callable[..., Any], epoch: int, epoch_samples: int, left: int
):
    loader = data(batch_size=2, num_train_images=11).train_loader(seed=0)
    assert steps_left(loader, 2, epochs=4, epoch=epoch, epoch_samples=epoch_samples) == left


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


def test_before_a_size_is_captured_the_checkpoint_is_written(trainer: Callable[..., Any], tmp_path: Path):
    """The thread that writes it waits for the GPU, which would end the capture."""
    run = trainer(tmp_path)
    graphs = SimpleNamespace(before_capture=None)
    again = Trainer(
        replace(run.state, graphs=graphs),
        *(run.train_loader, run.val_loader, run.evaluator, run.postprocess),
        settings=run.settings,
        folder=run.folder,
        description=run.description,
        context=run.context,
        progress=run.progress,
        logger=run.logger,
    )
    checkpoint = run_checkpoint(again.state, again.progress, again.description, random_states=[], train_s=0.0)
    again.writer.save(checkpoint, is_best=False)
    graphs.before_capture()
    assert load_checkpoint(run.folder.last).global_step == 0
    assert again.writer._pending is None
