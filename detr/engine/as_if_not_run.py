"""Passes through the detector beside its training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from detr.engine.random_state import restore_torch_streams, torch_streams


@contextmanager
def as_if_not_run(detector: nn.Module, device: torch.device) -> Iterator[None]:
    """Passes in here leave no trace in batch statistics (the buffers of `detector`) and random streams."""
    streams = torch_streams(device)
    buffers = [buffer.clone() for buffer in detector.buffers()]
    try:
        yield
    finally:
        restore_torch_streams(streams, device)
        with torch.no_grad():
            for buffer, before in zip(detector.buffers(), buffers, strict=True):
                buffer.copy_(before)
