"""The Triton backend where there is no GPU: interpreted, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")


def test_kernels_through_the_interpreter():
    """triton_cases.py in a process with TRITON_INTERPRET=1; its report is this test's message."""
    cases = Path(__file__).with_name("triton_cases.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
