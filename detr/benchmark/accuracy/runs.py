"""Training runs of many configurations and seeds, several at once, over as many sittings as it takes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from detr.benchmark.accuracy.row import AccuracyRow, read_accuracy_rows, row_of_run
from detr.benchmark.folder_lock import locked_folder
from detr.benchmark.override_value import quoted_value
from detr.benchmark.processes import failure_reason, raising_on_sigterm
from detr.engine.preemption import REQUEUE_EXIT_CODE
from detr.telemetry.loggers import repair_last_line

_POLL_S = 0.2
# a run that is asked to stop saves its checkpoint
_GRACE_S = 60.0
# of every run, given after its overrides
_OWN_KEYS = {"seed": "seeds=[...]", "name": "names in rows", "output_dir": "output_dir= of the comparison"}


@dataclass(frozen=True)
class RunSpec:
    """A run to be made.

    Attributes:
        name: Of the configuration.
        seed: Of the run.
        overrides: Of tools/train.py, the seed and the folder left out.
    """

    name: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.name}_seed{self.seed}"


@dataclass
class _Running:
    spec: RunSpec
    process: "subprocess.Popen[bytes]"
    gpu: str | None
    started_s: float
    log_start: int
    asked_to_stop_s: float | None = None
    took_too_long: bool = False


def plan_runs(rows: Mapping[str, Sequence[str]], seeds: Sequence[int], shared: Sequence[str]) -> list[RunSpec]:
    """Every configuration with the first seed, then every one with the second: a sitting that ends early is balanced.

    Args:
        rows: Overrides by name.
        seeds: Of the runs.
        shared: Overrides of all, before their own.

    Raises:
        ValueError: There are no rows or seeds, a seed twice or none that is a whole number, a configuration that does
            not name its kernel, has a name that cannot be a folder's, or a key that each run gets of its own.
    """
    if not rows or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"a comparison needs rows and different seeds; got {len(rows)} rows and seeds {list(seeds)}")
    if any(type(seed) is not int for seed in seeds):
        raise ValueError(f"seeds are whole numbers, as in [0,1,2]; got {list(seeds)}")
    for name, overrides in rows.items():
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise ValueError(
                f"row {name!r} names folders of runs; use letters, digits, and . + - _ after the first of them"
            )
        for text in (*shared, *overrides):
            key = text.partition("=")[0].lstrip("+~")
            if key in _OWN_KEYS:
                raise ValueError(
                    f"row {name} sets {text}, but each run gets its own {key}; leave it out and give {_OWN_KEYS[key]}"
                )
        kernels = [text for text in (*shared, *overrides) if text.startswith(("kernel=", "kernel.backend="))]
        if not kernels or kernels[-1].endswith("=auto"):
            raise ValueError(
                f"row {name} does not name its kernel; add kernel=reference, triton or cuda, so that it says what "
                "it ran"
            )
    return [RunSpec(name, seed, (*shared, *rows[name])) for seed in seeds for name in rows]


def run_sitting(
    script: Path,
    specs: Sequence[RunSpec],
    *,
    folder: Path,
    num_parallel: int = 1,
    gpus: Sequence[str | None] = (None,),
    minutes: float | None = None,
    expected_s: float = 60.0,
    timeout_s: float = 3600.0,
    retry_failed: bool = False,
) -> list[AccuracyRow]:
    """Make the runs that are not in `folder/rows.jsonl` yet, appending a row as each ends.

    A run that fails becomes a row with its reason, and is not tried again unless asked for. One that the end of the
    sitting cuts short saves its checkpoint and is gone on with in the next.

    Args:
        script: tools/train.py.
        specs: What to run, in this order.
        folder: Gets rows.jsonl, and runs/LABEL and runs/LABEL.log of each run.
        num_parallel: Runs at once on each GPU.
        gpus: What CUDA_VISIBLE_DEVICES is for a run on each; None: as it is.
        minutes: Of this sitting; a run that would probably end later is not started. None: no limit.
        expected_s: How long a run takes, as long as none has shown it.
        timeout_s: A run that takes longer is ended.
        retry_failed: Try again what has failed in earlier sittings.

    Returns:
        All rows of the file that belong to `specs`, one a spec at most: the last.

    Raises:
        ValueError: No run would start with these numbers, the folder is in use, or rows.jsonl is damaged.
    """
    limits = {"num_parallel": num_parallel, "minutes": minutes, "run_timeout_s": timeout_s}
    for key, limit in limits.items():
        if limit is not None and (isinstance(limit, str) or limit <= 0):
            raise ValueError(f"{key} must be a number above 0; got {limit}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder) as lock, raising_on_sigterm():
        rows_file, runs = folder / "rows.jsonl", folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        rows_file.touch()
        repair_last_line(rows_file)
        known = latest_rows(read_accuracy_rows(rows_file), specs)
        pending = [spec for spec in specs if spec not in known or (retry_failed and not known[spec].is_ok)]
        num_slots = num_parallel * len(gpus)
        _say(f"{len(specs) - len(pending)} of {len(specs)} runs are done, {len(pending)} to go, {num_slots} at once")
        took_s = {row.name: row.wall_s for row in known.values() if row.wall_s is not None}
        deadline_s = None if minutes is None else time.monotonic() + 60 * minutes
        running: list[_Running] = []
        try:
            while True:
                now_s = time.monotonic()
                for spec in list(pending):
                    guess_s = took_s.get(spec.name, max(took_s.values(), default=expected_s))
                    if len(running) < num_slots and (deadline_s is None or now_s + guess_s <= deadline_s):
                        pending.remove(spec)
                        gpu = min(gpus, key=[run.gpu for run in running].count)
                        running.append(_start(script, spec, runs, gpu, num_slots, lock))
                if not running:
                    break
                for run in list(running):
                    if run.process.poll() is not None:
                        running.remove(run)
                        row = _row(run, runs)
                        if row is None:
                            continue
                        took_s[run.spec.name] = time.monotonic() - run.started_s
                        known[run.spec] = row
                        with rows_file.open("a", encoding="utf-8") as file:
                            file.write(row.to_json() + "\n")
                    else:
                        _stop_if_late(run, deadline_s, timeout_s)
                time.sleep(_POLL_S)
        finally:
            # as at the end of a sitting: each saves its checkpoint, if there is time
            for run in running:
                run.process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + _GRACE_S
            while any(run.process.poll() is None for run in running) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            for run in running:
                _kill(run.process)
    if pending:
        _say(f"{len(pending)} runs were not started in the time of this sitting; the same command goes on with them")
    return [known[spec] for spec in specs if spec in known]


def gpus_to_share(num_gpus: int) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES is for a process on each of the first `num_gpus` GPUs; [None] for one: as it is.

    Raises:
        ValueError: CUDA_VISIBLE_DEVICES names fewer.
    """
    if num_gpus < 1:
        raise ValueError(f"gpus must be at least 1; got {num_gpus}")
    if num_gpus == 1:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(num_gpus)] if visible is None else visible.split(",")
    if len(names) < num_gpus:
        raise ValueError(
            f"gpus={num_gpus}, but CUDA_VISIBLE_DEVICES={visible} names {len(names)}; lower gpus or unset it"
        )
    return list(names[:num_gpus])


def latest_rows(rows: Sequence[AccuracyRow], specs: Sequence[RunSpec]) -> dict[RunSpec, AccuracyRow]:
    """The last row of each spec; rows of other overrides, as of an older preset, belong to none."""
    by_key = {(row.name, row.seed, row.overrides): row for row in rows}
    found = {spec: by_key.get((spec.name, spec.seed, spec.overrides)) for spec in specs}
    return {spec: row for spec, row in found.items() if row is not None}


def _start(script: Path, spec: RunSpec, runs: Path, gpu: str | None, num_slots: int, lock: int) -> _Running:
    arguments = [*spec.overrides, f"seed={spec.seed}", f"name={spec.label}"]
    arguments += [f"output_dir={quoted_value(str(runs / spec.label))}"]
    threads = str(max(1, (os.cpu_count() or 1) // num_slots))
    _say(f"{spec.label} starts")
    with (runs / f"{spec.label}.log").open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": threads} | os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            # a session of its own, so that its data workers end with it
            start_new_session=True,
            pass_fds=(lock,),
        )
    return _Running(spec, process, gpu, time.monotonic(), log_start)


def _stop_if_late(run: _Running, deadline_s: float | None, timeout_s: float) -> None:
    now_s = time.monotonic()
    if run.asked_to_stop_s is None:
        run.took_too_long = now_s - run.started_s > timeout_s
        if run.took_too_long or (deadline_s is not None and now_s > deadline_s):
            run.asked_to_stop_s = now_s
            run.process.send_signal(signal.SIGTERM)
    elif now_s - run.asked_to_stop_s > _GRACE_S:
        _kill(run.process)


def _row(run: _Running, runs: Path) -> AccuracyRow | None:
    """The row of a run that has ended; None where it only stopped, to be gone on with."""
    spec, code = run.spec, run.process.returncode
    took_s = time.monotonic() - run.started_s
    date = datetime.now(UTC).isoformat(timespec="minutes")
    if code == 0:
        try:
            row = row_of_run(
                runs / spec.label, name=spec.name, seed=spec.seed, overrides=spec.overrides, wall_s=took_s, date=date
            )
        except (ValueError, OSError) as error:
            # one run without numbers must not end the others
            status = f"failed: {error}"
        else:
            _say(f"{spec.label}: AP {row.AP:.4f}, AP50 {row.AP50:.4f} ({took_s:.0f} s)")
            return row
    elif run.took_too_long:
        status = f"failed: ended after {took_s:.0f} s, which is longer than a run may take"
    elif run.asked_to_stop_s is not None or code == REQUEUE_EXIT_CODE:
        _say(f"{spec.label} was stopped after {took_s:.0f} s; the same command goes on with it")
        return None
    else:
        # a log of several sittings holds the errors of each
        said = (runs / f"{spec.label}.log").read_bytes()[run.log_start :].decode(errors="replace")
        status = f"failed: {failure_reason(said)} (exit code {code})"
    _say(f"{spec.label} {status} ({took_s:.0f} s)")
    return AccuracyRow(spec.name, spec.seed, status, wall_s=took_s, date=date, overrides=spec.overrides)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
