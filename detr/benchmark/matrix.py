"""Rows of a benchmark, each in a fresh process, in an order that cancels drift."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from detr.benchmark.step_row import StepRow


def interleaved(names: Sequence[str], repeats: int) -> Iterator[tuple[str, int]]:
    """(name, repeat) forwards, backwards, forwards, ...: a machine that slows down slows all rows alike."""
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            yield name, repeat


def run_matrix(
    command: Sequence[str],
    rows: Mapping[str, Sequence[str]],
    *,
    shared: Sequence[str],
    repeats: int,
    rows_file: Path,
    timeout_s: float = 1800,
) -> list[StepRow]:
    """Measure every row `repeats` times; what is measured is appended to `rows_file` at once.

    A row that fails (out of memory, a missing backend) becomes a row with its reason, and the rest go on.

    Args:
        command: What measures a row when given its overrides, `row=NAME` and `result=FILE`.
        rows: Overrides by name.
        shared: Overrides of all rows, before their own.
        repeats: Processes a row.
        rows_file: JSON lines.
        timeout_s: A row that takes longer is ended.

    Raises:
        ValueError: There are no rows, or a row asks for kernel=auto, which would not say what it measured.
    """
    if not rows or repeats < 1:
        raise ValueError(f"a benchmark needs rows and repeats >= 1; got {len(rows)} rows and repeats={repeats}")
    for name, overrides in rows.items():
        if "kernel=auto" in (*shared, *overrides) or "kernel.backend=auto" in (*shared, *overrides):
            raise ValueError(
                f"row {name} asks for kernel=auto; name the backend, so that the row says what it measured"
            )
    measured = []
    for name, repeat in interleaved(list(rows), repeats):
        print(f"row {name}, repeat {repeat + 1} of {repeats} ...", file=sys.stderr, flush=True)
        row = _run_row([*command, *shared, *rows[name]], name, repeat, timeout_s)
        measured.append(row)
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(row.to_json() + "\n")
        shown = f"{row.images_per_s:.2f} images/s" if row.images_per_s is not None else row.status
        print(f"row {name}, repeat {repeat + 1} of {repeats}: {shown}", file=sys.stderr, flush=True)
    return measured


def _run_row(command: Sequence[str], name: str, repeat: int, timeout_s: float) -> StepRow:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        arguments = [*command, f"row={name}", f"result={result}", f"repeat={repeat}"]
        try:
            finished = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return StepRow(name, repeat, f"failed: took more than {timeout_s:.0f} s")
        if result.is_file():
            return StepRow.from_json(result.read_text(encoding="utf-8"))
        said = [line for line in finished.stderr.strip().splitlines() if line.strip()]
        reason = next((line for line in said if line.startswith("error:")), said[-1] if said else "no message")
        return StepRow(name, repeat, f"failed: {reason.removeprefix('error: ')}")
