"""Fixtures of every test."""

import logging
from collections.abc import Iterator
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
def shared_dir() -> Path:
    """The folder of reference tensors and real data beside the checkout; tests skip where it is absent."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"the reference material is not at {path}")
    return path


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A test that configures logging, as the tools do, leaves no trace of it."""
    loggers = [logging.getLogger(name) for name in (None, "detr", "ops")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
