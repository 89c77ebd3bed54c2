"""Hardware counters through Nsight Compute, where it is installed and allowed to read them."""

import csv
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 300


@dataclass(frozen=True)
class Counters:
    """Counters of some launches, or why there are none.

    Attributes:
        launches: Of each launch in order, value by metric, in base units.
        reason: Why `launches` is empty; empty if it is not.
    """

    launches: tuple[dict[str, float], ...]
    reason: str = ""


def ncu_command(command: Sequence[str], metrics: Sequence[str], log: Path) -> list[str]:
    """What runs `command` under ncu and writes the counters of what it launches between profiler start and stop."""
    options = ["--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all"]
    return ["ncu", *options, "--metrics", ",".join(metrics), "--log-file", str(log), *command]


def read_counters(command: Sequence[str], metrics: Sequence[str], *, num_launches: int, log: Path) -> Counters:
    """Run `command` under ncu.

    Args:
        metrics: Names of ncu's.
        num_launches: As many launches must have been counted.
        log: Where ncu writes its table.
    """
    if shutil.which("ncu") is None:
        return Counters((), "ncu is not installed")
    try:
        run = subprocess.run(
            ncu_command(command, metrics, log), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Counters((), f"ncu took longer than {_TIMEOUT_S} s")
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    if "ERR_NVGPUCTRPERM" in text + run.stdout + run.stderr:
        return Counters((), "the driver lets only administrators read counters (ERR_NVGPUCTRPERM)")
    launches = parse_ncu_csv(text)
    if len(launches) != num_launches:
        said = (text + run.stdout + run.stderr).strip().splitlines()[-1:]
        return Counters((), f"ncu counted {len(launches)} launches of {num_launches}: {' '.join(said)}")
    return Counters(tuple(launches))


def parse_ncu_csv(text: str) -> list[dict[str, float]]:
    """The table that `ncu --csv` prints, a row a metric, as one dictionary a launch.

    Lines of ncu itself (`==PROF==`) around the table are skipped; values that are no numbers (`n/a`) are left out.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        metrics = launches.setdefault(row["ID"], {})
        value = row["Metric Value"].replace(",", "")
        try:
            metrics[row["Metric Name"]] = float(value)
        except ValueError:
            # ncu writes n/a for what this GPU does not count
            continue
    return [launches[launch] for launch in sorted(launches, key=int)]
