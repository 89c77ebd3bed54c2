"""A few of the kills of scripts/prove_resume.sh."""

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("killed_runs.py")


def test_killed_processes_lose_nothing(repository: Path):
    finished = subprocess.run(
        [sys.executable, str(WORKER), "saving", "resume", "--kills", "2", "--world-sizes", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
