"""metrics.jsonl: the record of a run, one JSON object a line, which outlives kills and resumes."""

import json
import math
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

# evaluations of which one ran in a process that was not just started
_NUM_PAST = 3


class JsonlLogger:
    """Appends one line a call: `step`, `time_s` (seconds since 1970) and the values, flushed at once.

    NaN and infinity are written as null, since JSON has neither. A line that a kill cut off is removed before
    the first new one. An error of the file system is raised: without its record a run is not worth its time.

    Args:
        path: The file; made with its folder at the first `log`.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: TextIO | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            repair_last_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        row = {"step": step, "time_s": round(time.time(), 3)}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None  # type: ignore[assignment]
        # one write a line, so that a kill cuts at most the last line
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl by ascending step, as the run went in the end.

    Lines of one step are merged. Where the steps go back (the run was killed and resumed from an earlier
    checkpoint) what was logged for later steps before is dropped. A line cut off at the end is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line before the last is not a JSON object with an integer `step`.
    """
    path = Path(path)
    lines = _lines(path)
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        row = _object(line)
        if row is None or not isinstance(row.get("step"), int):
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is not a JSON object with an integer step: {line[:80]!r}")
        step = row["step"]
        for later in [logged for logged in rows if logged > step]:
            del rows[later]
        rows.setdefault(step, {}).update(row)
    return list(rows.values())


def past_evaluation_s(path: Path | str) -> float | None:
    """Seconds that an evaluation of a run took, with the saving around it, by the clock of its metrics.jsonl.

    What passed since the line before, training left out. Where the process was another one, that holds the time in
    which none ran; so of the last evaluations the shortest counts.

    Returns:
        None: There is no file, or no evaluation with a line before it. Lines that tell no time are left out.
    """
    path = Path(path)
    rows = [_object(line) for line in _lines(path)] if path.is_file() else []
    times = [(row, row.get("time_s"), row.get("train/minutes")) for row in rows if row is not None]
    told = [
        (row, float(time_s), float(minutes))
        for row, time_s, minutes in times
        if isinstance(time_s, int | float) and isinstance(minutes, int | float)
    ]
    pauses_s = [
        time_s - before_s - 60 * (minutes - before_minutes)
        for (_, before_s, before_minutes), (row, time_s, minutes) in pairwise(told)
        # where a run went back to its checkpoint, what was trained in between is not known
        if any(name.startswith("val/") for name in row) and minutes >= before_minutes
    ]
    return max(0.0, min(pauses_s[-_NUM_PAST:])) if pauses_s else None


def _lines(path: Path) -> list[str]:
    # bytes that are no text are in a line that is not JSON, which the error names
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def repair_last_line(path: Path) -> None:
    """Make the file end with a whole line: finish one that lacks only its end, cut off one that is torn."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if not content or content.endswith(b"\n"):
            return
        whole, _, last = content.rpartition(b"\n")
        if _object(last.decode("utf-8", errors="replace")) is not None:
            file.write(b"\n")
        else:
            file.truncate(len(whole) + 1 if whole else 0)
