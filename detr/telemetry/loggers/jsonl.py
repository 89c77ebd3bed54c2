"""metrics.jsonl: the record of a run, one JSON object a line, which outlives kills and resumes."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


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
    # bytes that are no text are in a line that is not JSON, which the error names
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
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
