"""Progress on the terminal: a live bar for people, plain lines for log files."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from detr.telemetry.loggers.time_left import Evaluations, TimeLeft

T = TypeVar("T")

# losses of single decoder layers (loss_ce_0) and of the proposals (loss_ce_enc), single classes (val/AP/cat)
_HIDDEN = re.compile(r"_(\d+|enc)$|/.*/")
_PLAIN_PROGRESS_INTERVAL_S = 30.0


class ConsoleLogger:
    """Prints one line a `log`, and on a terminal keeps a bar below with the time left, speed and memory.

    Losses of single layers and values of single classes are left to the other loggers. `train/minutes` of a log is how
    long the run has trained, evaluations left out; with `val/` values an evaluation ends. The time left is that of
    `TimeLeft`, and "of training" as long as no evaluation has shown how long it takes. Where minutes end the run before
    its schedule, bar and lines count up to the step at which they will, a guess from the speed: 50/~320.

    Args:
        num_steps: The step at which the schedule ends, for the bar and the time left. None: not known.
        first_step: Steps done before this process, after a resume.
        first_minutes: Trained before this process.
        max_minutes: Of training, after which the run ends sooner than by its steps. None: the steps alone.
        evaluations: When the run evaluates. None: at its end alone.
        console: Where to print; stdout by default. Whether it is a terminal decides about the bar.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        *,
        first_step: int = 0,
        first_minutes: float = 0.0,
        max_minutes: float | None = None,
        evaluations: Evaluations | None = None,
        console: Console | None = None,
    ) -> None:
        self._time_left: TimeLeft | None = None
        if num_steps is not None:
            self._time_left = TimeLeft(
                num_steps,
                first_step=first_step,
                first_minutes=first_minutes,
                max_minutes=max_minutes,
                evaluations=evaluations,
            )
        self._console = console or Console()
        self._progress: Progress | None = None
        self._step_task: TaskID | None = None
        # the last speed and memory, which stay on the bar while other values are logged
        self._speeds: dict[str, str] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._time_left is not None:
            is_evaluation = any(name.startswith("val/") for name in values)
            self._time_left.log(step, minutes=values.get("train/minutes"), is_evaluation=is_evaluation)
        shown = [_format_value(name, value) for name, value in values.items() if not _HIDDEN.search(name)]
        time_left = self._format_time_left()
        self._print(
            " | ".join([f"step {step}{self._format_last_step(step)}", *shown, *([time_left] if time_left else [])])
        )
        if self._console.is_terminal and self._time_left is not None:
            progress = self._live_progress()
            for name, value in values.items():
                if name.endswith(("images_per_s", "gpu_memory_gib")):
                    self._speeds[name] = _format_value(name, value)
            notes = [time_left, *self._speeds.values()]
            self.advance(step)
            assert self._step_task is not None
            progress.update(self._step_task, total=self._time_left.last_step, note="  ".join(filter(None, notes)))

    def advance(self, step: int) -> None:
        """Move the bar between two logs; nothing without a terminal."""
        if not self._console.is_terminal or self._time_left is None:
            return
        progress = self._live_progress()
        if self._step_task is None:
            self._step_task = progress.add_task("train", total=self._time_left.last_step, note="")
        progress.update(self._step_task, completed=step)

    def track(self, items: Iterable[T], description: str, *, num_items: int | None = None) -> Iterator[T]:
        """Yield `items` with their own bar on a terminal, and a line now and then otherwise.

        Args:
            items: What to go through, as the batches of an evaluation.
            description: What is done, as "evaluate".
            num_items: Their number, where `len(items)` does not say.
        """
        if num_items is None and isinstance(items, Sequence):
            num_items = len(items)
        if self._console.is_terminal:
            progress = self._live_progress()
            task = progress.add_task(description, total=num_items, note="")
            try:
                for item in items:
                    yield item
                    progress.advance(task)
            finally:
                progress.remove_task(task)
                if self._step_task is None:
                    self.close()
            return
        last_line_s = time.monotonic()
        for number, item in enumerate(items, start=1):
            yield item
            if time.monotonic() - last_line_s >= _PLAIN_PROGRESS_INTERVAL_S:
                last_line_s = time.monotonic()
                self._print(f"{description} {number}" + ("" if num_items is None else f"/{num_items}"))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._step_task = None

    def _print(self, line: str) -> None:
        # soft_wrap: a line stays one line in a file, whatever width rich assumes for it
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _live_progress(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._console,
            )
            self._progress.start()
        return self._progress

    def _format_last_step(self, step: int) -> str:
        last_step = None if self._time_left is None else self._time_left.last_step
        if self._time_left is None or last_step is None:
            return ""
        return f"/~{last_step}" if self._time_left.ends_by_time and last_step > step else f"/{last_step}"

    def _format_time_left(self) -> str:
        """Nothing where it is not known, or nothing is left to train."""
        left_s = None if self._time_left is None else self._time_left.seconds
        if self._time_left is None or not left_s:
            return ""
        return format_duration(left_s) + (" left" if self._time_left.knows_evaluations else " of training left")


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03, with days in front from one day on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def _format_value(name: str, value: float) -> str:
    if name.startswith("val/") and value < 0:
        # AP and recall of nothing: -1 in the other loggers, which take numbers only
        return f"{name} -"
    name = name.removeprefix("train/")
    last = name.rpartition("/")[2]
    for suffix, unit in (("_gib", "GiB"), ("_ms", "ms"), ("_s", "s")):
        if last.endswith("_per_s"):
            return f"{value:.1f} {name.removesuffix('_per_s')}/s"
        if last.endswith(suffix):
            return f"{name.removesuffix(suffix)} {value:.1f} {unit}"
    if last == "epoch" or (isinstance(value, int) and not isinstance(value, bool)):
        return f"{name} {value:.6g}"
    if last == "lr" or last.startswith("lr_"):
        return f"{name} {value:.2e}"
    return f"{name} {value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{name} {value:.3e}"
