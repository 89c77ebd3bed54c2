"""Fixtures of every test."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# tests run side by side in one process a core; threads within them would only fight
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For processes that import this checkout, and what the caller's PYTHONPATH names."""
    folders = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, folders))}


@pytest.fixture(scope="session")
def run_script(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of this checkout in a process of its own, or in `ranks` under torchrun; what it said is the message
    where it ends with another exit code."""

    def run(
        script: Path, *arguments: str, ranks: int = 1, cwd: Path | None = None, timeout_s: float = 120, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        finished = subprocess.run(
            [sys.executable, *torchrun, str(script), *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert finished.returncode == code, finished.stdout + finished.stderr
        return finished

    return run


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference tensors and real data beside the checkout; tests skip where it is absent."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"the reference material is not at {path}")
    return path


@pytest.fixture(scope="session")
def interpret(environment: dict[str, str]) -> Callable[[Path], None]:
    """Runs a file of tests in a process that interprets Triton's kernels, without a GPU; its report is the message."""
    pytest.importorskip("triton", reason="Triton is for Linux")

    def run_cases(cases: Path) -> None:
        settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
            env=environment | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

    return run_cases


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A test that configures logging, as the tools do, leaves no trace of it."""
    loggers = [logging.getLogger(name) for name in (None, "detr", "ops")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
