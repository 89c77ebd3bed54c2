"""Loggers: the record on disk, the console, and several as one."""

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from detr.telemetry.loggers import (
    CompositeLogger,
    ConsoleLogger,
    Evaluations,
    JsonlLogger,
    past_evaluation_s,
    read_metrics,
)
from detr.telemetry.loggers.console import format_duration


def log_rows(path: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    logger = JsonlLogger(path)
    for step, values in rows:
        logger.log(step, values)
    logger.close()


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time_s"} for row in rows]


class TestJsonl:
    def test_every_line_is_strict_json_and_there_at_once(self, tmp_path: Path):
        path = tmp_path / "run" / "metrics.jsonl"
        logger = JsonlLogger(path)
        assert not path.parent.exists()
        logger.log(10, {"train/loss": 2.5, "train/grad_norm": float("inf"), "train/x": float("nan")})
        # read before close: what was logged survives a kill
        (line,) = path.read_text().splitlines()
        row = json.loads(line, parse_constant=pytest.fail)
        assert row.pop("time_s") > 1e9
        assert row == {"step": 10, "train/loss": 2.5, "train/grad_norm": None, "train/x": None}
        logger.close()

    def test_one_step_may_be_logged_in_parts(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        log_rows(path, [(10, {"train/loss": 1.0}), (10, {"val/AP": 0.5})])
        assert without_time(read_metrics(path)) == [{"step": 10, "train/loss": 1.0, "val/AP": 0.5}]

    @pytest.mark.parametrize("torn", ['{"step": 30, "train/lo', '{"step": 30, "train/loss": 1', "{", '{"step": 3}{"st'])
    def test_a_line_cut_by_a_kill_is_removed(self, tmp_path: Path, torn: str):
        path = tmp_path / "metrics.jsonl"
        log_rows(path, [(10, {"train/loss": 3.0})])
        with path.open("a") as file:
            file.write(torn)
        assert without_time(read_metrics(path)) == [{"step": 10, "train/loss": 3.0}]
        log_rows(path, [(20, {"train/loss": 2.0})])
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]

    def test_bytes_that_are_no_text_are_named_by_their_line(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(b'\xff\xfe\n{"step": 2}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl line 1 is not a JSON object"):
            read_metrics(path)

    def test_a_first_line_cut_by_a_kill_is_removed(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1')
        log_rows(path, [(2, {"a": 1.0})])
        assert without_time(read_metrics(path)) == [{"step": 2, "a": 1.0}]

    def test_a_whole_line_that_lacks_only_its_end_is_kept(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "a": 2.0}')
        log_rows(path, [(2, {"a": 1.0})])
        assert without_time(read_metrics(path)) == [{"step": 1, "a": 2.0}, {"step": 2, "a": 1.0}]

    def test_steps_that_a_resumed_run_repeats_replace_the_lost_ones(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        # the checkpoint was at step 20; 30 and 40 were lost in the kill
        log_rows(path, [(step, {"a": float(step), "lost": 1.0}) for step in (10, 20, 30, 40)])
        log_rows(path, [(25, {"a": 0.0}), (30, {"a": 0.5})])
        rows = without_time(read_metrics(path))
        assert [row["step"] for row in rows] == [10, 20, 25, 30]
        assert rows[-1] == {"step": 30, "a": 0.5}

    def test_a_broken_line_in_the_middle_is_an_error(self, tmp_path: Path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
        with pytest.raises(ValueError, match="line 2 is not a JSON object"):
            read_metrics(path)

    @pytest.mark.parametrize(
        ("rows", "seconds"),
        [
            ([], None),
            # (time_s, minutes trained, whether it is an evaluation)
            ([(100.0, 1.0, True)], None),
            ([(100.0, 1.0, False), (220.0, 3.0, False)], None),
            ([(100.0, 1.0, False), (265.0, 3.0, True)], 45.0),
            # an hour in which nothing ran, before a missed evaluation
            ([(100.0, 1.0, False), (265.0, 3.0, True), (325.0, 4.0, False), (4000.0, 4.0, True)], 45.0),
            # back to the checkpoint: no training to tell from the rest
            ([(100.0, 3.0, False), (265.0, 2.0, True)], None),
            # of the last three: the first was on fewer images
            ([(0.0, 0.0, False), (5.0, 0.0, True), (45.0, 0.0, True), (90.0, 0.0, True), (131.0, 0.0, True)], 40.0),
        ],
    )
    def test_what_evaluations_took_is_read_from_the_log(
        self, tmp_path: Path, rows: list[tuple[float, float, bool]], seconds: float | None
    ):
        path = tmp_path / "metrics.jsonl"
        assert past_evaluation_s(path) is None
        lines = [
            {"step": number, "time_s": time_s, "train/minutes": minutes} | ({"val/AP": 0.1} if is_evaluation else {})
            for number, (time_s, minutes, is_evaluation) in enumerate(rows)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "time')
        assert past_evaluation_s(path) == seconds


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("enabled", [True, False])
def test_only_an_enabled_composite_logs(enabled: bool):
    recorders = [Recorder(), Recorder()]
    logger = CompositeLogger(recorders, enabled=enabled)
    logger.log(3, {"a": 1.0})
    logger.close()
    for recorder in recorders:
        assert recorder.rows == ([(3, {"a": 1.0})] if enabled else [])
        assert recorder.is_closed == enabled


class MediaRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.media: list[tuple[Any, ...]] = []

    def log_images(self, step: int, name: str, images: Mapping[str, Any]) -> None:
        self.media.append((step, name, list(images)))

    def log_table(self, step: int, name: str, columns: Any, rows: Any) -> None:
        self.media.append((step, name, columns, rows))


class TestMedia:
    PICTURE = np.zeros((4, 6, 3), dtype=np.uint8)

    def test_pictures_and_tables_go_to_those_that_take_them(self):
        plain, taker = Recorder(), MediaRecorder()
        logger = CompositeLogger([plain, taker])
        assert logger.takes_media
        logger.log_images(3, "val/x", {"image 1": self.PICTURE})
        logger.log_table(3, "val/classes", ["class", "AP"], [["cat", None]])
        assert taker.media == [(3, "val/x", ["image 1"]), (3, "val/classes", ["class", "AP"], [["cat", None]])]

    def test_ranks_above_zero_and_plain_loggers_take_none(self, tmp_path: Path):
        taker = MediaRecorder()
        disabled = CompositeLogger([taker], enabled=False)
        plain = CompositeLogger([JsonlLogger(tmp_path / "x.jsonl"), ConsoleLogger()])
        for logger in (disabled, plain):
            assert not logger.takes_media
            logger.log_images(3, "val/x", {"image 1": self.PICTURE})
        assert taker.media == []

    @pytest.mark.parametrize(
        "picture", [PICTURE.astype(np.float32), PICTURE[..., :1], PICTURE.transpose(2, 0, 1), PICTURE[0]]
    )
    def test_a_picture_of_another_form_is_refused(self, picture: Any):
        with pytest.raises(ValueError, match=r"val/x, image 1: pictures are \(h, w, 3\) uint8 RGB; got"):
            CompositeLogger([MediaRecorder()]).log_images(1, "val/x", {"image 1": picture})

    def test_a_row_with_a_cell_too_many_is_refused(self):
        with pytest.raises(ValueError, match="val/classes: row 1 has 3 cells for 2 columns"):
            CompositeLogger([MediaRecorder()]).log_table(1, "val/classes", ["a", "b"], [[1.0, 2.0], [1.0, 2.0, 3.0]])


class TestConsole:
    VALUES: Mapping[str, float] = {
        "epoch": 2,
        "train/loss": 12.345678,
        "train/loss_ce": 0.0001234,
        "train/loss_ce_0": 9.0,
        "train/loss_bbox_enc": 9.0,
        "train/lr": 2e-4,
        "images_per_s": 31.26,
        "gpu_memory_gib": 10.04,
        "val/AP50": 0.5,
        "val/AP/cat": 9.0,
    }

    def make(self, *, is_terminal: bool, num_steps: int | None = 1000) -> tuple[ConsoleLogger, io.StringIO]:
        file = io.StringIO()
        console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
        return ConsoleLogger(num_steps, console=console), file

    def test_plain_output_is_one_line_a_log(self, monkeypatch: pytest.MonkeyPatch):
        now_s = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        logger, file = self.make(is_terminal=False)
        now_s += 10
        logger.log(50, self.VALUES)
        logger.close()
        # 50 of 1000 steps in 10 s leave 190 s; longer than the console is wide, but one line
        assert file.getvalue() == (
            "step 50/1000 | epoch 2 | loss 12.3457 | loss_ce 1.234e-04 | lr 2.00e-04 | 31.3 images/s | "
            "gpu_memory 10.0 GiB | val/AP50 0.5000 | 0:03:10 left\n"
        )

    def test_what_an_evaluation_cannot_measure_is_a_dash(self):
        logger, file = self.make(is_terminal=False, num_steps=None)
        logger.log(1, {"val/AP": 0.0, "val/APs": -1.0, "val/ARs": -1.0, "train/x": -1.0})
        assert file.getvalue() == "step 1 | val/AP 0.0000 | val/APs - | val/ARs - | x -1.0000\n"

    def test_time_left_counts_from_the_resumed_step(self, monkeypatch: pytest.MonkeyPatch):
        now_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        file = io.StringIO()
        logger = ConsoleLogger(1000, first_step=900, console=Console(file=file))
        now_s = 10.0
        logger.log(950, {})
        assert "0:00:10 left" in file.getvalue()

    @pytest.mark.parametrize(
        ("num_steps", "minutes", "left"),
        [(1000, 7.5, "0:02:30"), (1000, 9.95, "0:00:03"), (100, 1.0, "0:01:00")],
    )
    def test_minutes_may_end_a_run_before_its_steps(
        self, monkeypatch: pytest.MonkeyPatch, num_steps: int, minutes: float, left: str
    ):
        now_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        file = io.StringIO()
        logger = ConsoleLogger(num_steps, max_minutes=10.0, console=Console(file=file))
        now_s = 60 * minutes
        logger.log(50, {"train/minutes": minutes})
        # a log without minutes says nothing new
        logger.log(50, {"epoch": 1})
        assert file.getvalue().count(f"| {left} of training left") == 2

    def test_no_time_is_left_when_the_minutes_are_over(self, monkeypatch: pytest.MonkeyPatch):
        now_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        file = io.StringIO()
        logger = ConsoleLogger(1000, max_minutes=10.0, console=Console(file=file))
        now_s = 612.0
        logger.log(50, {"train/minutes": 10.2})
        now_s += 60
        logger.log(50, {"val/AP": 0.5, "train/minutes": 10.2})
        assert file.getvalue() == ("step 50/50 | minutes 10.2000\nstep 50/50 | val/AP 0.5000 | minutes 10.2000\n")

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_what_is_counted_up_to_is_where_the_run_will_end(self, monkeypatch: pytest.MonkeyPatch, is_terminal: bool):
        """Not the end of a schedule that it will not reach."""
        now_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        file = io.StringIO()
        console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
        logger = ConsoleLogger(1000, max_minutes=10.0, evaluations=Evaluations(50), console=console)
        logger.advance(1)
        # 50 steps in 100 s: 300 in 10 minutes
        now_s = 100.0
        logger.log(50, {"train/minutes": 100 / 60})
        # an evaluation costs time, and no steps
        now_s = 160.0
        logger.log(50, {"val/AP": 0.5, "train/minutes": 100 / 60})
        logger.close()
        text = file.getvalue()
        assert text.count("step 50/~300 |") == 2
        # 500 s of training; 60 s after every 50 steps of it
        assert "0:08:20 of training left\n" in text
        assert "0:13:20 left\n" in text
        if is_terminal:
            assert "/?" in text
            assert " 50/300" in text
        assert "/1000" not in text

    def test_the_last_step_leaves_no_time(self):
        logger, file = self.make(is_terminal=False, num_steps=10)
        logger.log(10, {"train/loss": 1.0})
        assert file.getvalue() == "step 10/10 | loss 1.0000\n"

    def test_a_terminal_has_a_bar_with_speed_and_memory(self):
        logger, file = self.make(is_terminal=True)
        logger.advance(10)
        logger.log(50, self.VALUES)
        logger.advance(60)
        logger.close()
        text = file.getvalue()
        assert "60/1000" in text
        assert "31.3 images/s" in text
        assert "step 50/1000" in text

    @pytest.mark.parametrize("is_terminal", [True, False])
    @pytest.mark.parametrize("num_steps", [None, 1000])
    def test_tracking_yields_everything(self, is_terminal: bool, num_steps: int | None):
        logger, _ = self.make(is_terminal=is_terminal, num_steps=num_steps)
        logger.log(1, {})
        assert list(logger.track([1, 2, 3], "evaluate")) == [1, 2, 3]
        assert list(logger.track(iter("ab"), "evaluate", num_items=2)) == ["a", "b"]
        # abandoned half-way, as when the evaluation fails
        next(iter(logger.track([1, 2], "evaluate")))
        logger.log(2, {"val/AP": 0.1})
        logger.close()

    def test_long_loops_show_signs_of_life_in_plain_output(self, monkeypatch: pytest.MonkeyPatch):
        now_s = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        logger, file = self.make(is_terminal=False)
        for _ in logger.track(range(6), "evaluate"):
            now_s += 11.0
        assert file.getvalue() == "evaluate 3/6\nevaluate 6/6\n"

    @pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (3725, "1:02:05"), (90061.0, "1 d 1:01:01")])
    def test_durations(self, seconds: float, text: str):
        assert format_duration(seconds) == text


def test_telemetry_imports_no_logging_service():
    # a fresh interpreter: other tests have imported them
    import subprocess

    code = (
        "import sys, detr.telemetry.loggers; print([m for m in ('wandb', 'tensorboard', 'hydra') if m in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
