"""A few of the kills of scripts/prove_resume.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("killed_runs.py")


@pytest.mark.parametrize("arguments", ["resume --kills 1 --world-sizes 2", "saving --kills 4"])
def test_killed_processes_lose_nothing(arguments: str, repository: Path):
    finished = subprocess.run(
        [sys.executable, str(WORKER), *arguments.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
