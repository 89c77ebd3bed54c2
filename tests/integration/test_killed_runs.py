"""A few of the kills of scripts/prove_resume.sh."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("killed_runs.py")


def test_killed_processes_lose_nothing(environment: dict[str, str]):
    finished = subprocess.run(
        [sys.executable, str(WORKER), "saving", "resume", "--kills", "2", "--world-sizes", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
