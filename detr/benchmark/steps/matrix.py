"""Rows of a benchmark, each in a fresh process, in an order that cancels drift."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from detr.benchmark.override_value import quoted_value
from detr.benchmark.processes import end_session, failure_reason, raising_on_sigterm
from detr.benchmark.steps.row import StepRow


def interleaved(names: Sequence[str], repeats: int) -> Iterator[tuple[str, int]]:
    """(name, repeat) forwards, backwards, forwards, ...: a machine that slows down slows all rows alike."""
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            yield name, repeat


def run_matrix(
    script: Path,
    rows: Mapping[str, Sequence[str]],
    *,
    shared: Sequence[str],
    repeats: int,
    rows_file: Path,
    num_gpus: int,
    row_timeout_s: float = 1800,
    time_limit_s: float | None = None,
) -> list[StepRow]:
    """Measure every row `repeats` times; what is measured is appended to `rows_file` at once.

    A row that fails (out of memory, a missing backend, too few GPUs) becomes a row with its reason, and the rest go on.
    A row with `gpus=N` above 1 runs under torchrun.

    Args:
        script: What measures a row when given its overrides, `row=NAME`, `repeat=K` and `result=FILE`.
        rows: Overrides by name.
        shared: Overrides of all rows, before their own.
        repeats: Processes a row.
        rows_file: JSON lines.
        num_gpus: Of this machine.
        row_timeout_s: A row that takes longer is ended.
        time_limit_s: Of all rows together: what would probably end later is not started, and says so. None: no limit.

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
    measured: list[StepRow] = []
    started_s = time.monotonic()
    longest_s = 0.0
    for name, repeat in interleaved(list(rows), repeats):
        overrides = [*shared, *rows[name]]
        elapsed_s = time.monotonic() - started_s
        missing = _missing_gpus(overrides, num_gpus)
        if missing is not None:
            row = StepRow(name, repeat, f"not run: {missing}")
        elif time_limit_s is not None and elapsed_s + longest_s > time_limit_s:
            row = StepRow(name, repeat, f"not run: time_limit_s={time_limit_s:.0f} left no time for it")
        else:
            print(f"row {name}, repeat {repeat + 1} of {repeats} ...", file=sys.stderr, flush=True)
            row = _run_row(script, overrides, name, repeat, row_timeout_s)
        row_s = time.monotonic() - started_s - elapsed_s
        longest_s = max(longest_s, row_s)
        measured.append(row)
        with rows_file.open("a", encoding="utf-8") as file:
            file.write(row.to_json() + "\n")
        shown = f"{row.images_per_s:.2f} images/s" if row.images_per_s is not None else row.status
        print(f"row {name}, repeat {repeat + 1} of {repeats}: {shown} ({row_s:.0f} s)", file=sys.stderr, flush=True)
    return measured


def row_command(script: Path, arguments: Sequence[str]) -> list[str]:
    """What starts `script` with `arguments`: Python, or torchrun where they ask for several GPUs."""
    num_gpus = _num_gpus(arguments)
    if num_gpus == 1:
        return [sys.executable, str(script), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_gpus}"]
    return [*launcher, str(script), *arguments]


def _num_gpus(arguments: Sequence[str]) -> int:
    return int(_last_value(arguments, "gpus") or 1)


def _missing_gpus(arguments: Sequence[str], num_gpus: int) -> str | None:
    wanted = _num_gpus(arguments)
    if wanted == 1 or wanted <= num_gpus or _last_value(arguments, "device") == "cpu":
        return None
    return f"gpus={wanted}, and this machine has {num_gpus}"


def _last_value(arguments: Sequence[str], key: str) -> str | None:
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    return values[-1] if values else None


def _run_row(script: Path, overrides: Sequence[str], name: str, repeat: int, timeout_s: float) -> StepRow:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        arguments = [*overrides, f"row={name}", f"result={quoted_value(str(result))}", f"repeat={repeat}"]
        started_s = time.monotonic()
        # a session of its own, so that the data workers of a row end with it
        process = subprocess.Popen(
            row_command(script, arguments),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            with raising_on_sigterm():
                _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return StepRow(name, repeat, f"failed: took more than {timeout_s:.0f} s")
        finally:
            if process.poll() is None:
                end_session(process)
        if result.is_file():
            row = StepRow.from_json(result.read_text(encoding="utf-8"))
            start_s = time.monotonic() - started_s - sum(row.spent_s.values())
            return replace(row, spent_s={"start": start_s} | row.spent_s)
        return StepRow(name, repeat, f"failed: {failure_reason(said)}")
