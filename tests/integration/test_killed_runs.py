"""A few of the kills of scripts/prove_resume.sh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("killed_runs.py")


def test_killed_processes_lose_nothing(run_script: Callable[..., Any]):
    run_script(WORKER, "saving", "resume", "--kills", "2", "--world-sizes", "2", timeout_s=280)
