"""Fixtures of every test."""

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
