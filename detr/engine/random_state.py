"""The random streams of a process: seeded once, saved and restored with a checkpoint."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

# of the CPU, and of the GPU that is computed on
TorchStreams = tuple[Tensor, Tensor | None]


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch (CPU and all GPUs), numpy and random of this process with `seed + rank`."""
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    # numpy's global stream is what third-party transforms draw from
    np.random.seed(seed + rank)  # noqa: NPY002


def torch_streams(device: torch.device) -> TorchStreams:
    """The streams of PyTorch alone, which dropout draws from; cheap enough for every step, and without a wait."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore_torch_streams(streams: TorchStreams, device: torch.device) -> None:
    """Continue the streams of `torch_streams`. A CUDA stream is restored on a CUDA device only."""
    torch.set_rng_state(streams[0])
    if streams[1] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(streams[1], device)


def random_state(device: torch.device) -> dict[str, Any]:
    """The streams of this process as tensors and plain Python; `device` is the one it computes on."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]  # noqa: NPY002
    cpu_stream, cuda_stream = torch_streams(device)
    return {
        "torch": cpu_stream,
        "cuda": cuda_stream,
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue the streams of `random_state`. A CUDA stream is restored on a CUDA device only."""
    restore_torch_streams((state["torch"], state["cuda"]), device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    keys = np.array(keys, dtype=np.uint32)
    np.random.set_state((name, keys, position, has_gauss, cached))  # noqa: NPY002
