"""From the name of a backend to the code that runs it."""

import logging
from dataclasses import dataclass

import torch

from ops.msda.config import KernelConfig

logger = logging.getLogger("ops")


class BackendUnavailable(RuntimeError):
    """A backend that was named cannot run here. The message says why and what to do."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run on this machine.

    Attributes:
        available: True if the backend can run.
        reason: Why not, or what it runs on.
    """

    available: bool
    reason: str


def backends() -> dict[str, BackendStatus]:
    """What can run on this machine, by backend name, and why the rest cannot."""
    not_built = BackendStatus(False, "this release holds no kernels of this backend yet; use kernel=reference")
    return {
        "reference": BackendStatus(True, "plain PyTorch, any device and floating dtype"),
        "triton": not_built,
        "cuda": not_built,
    }


def resolve(kernel: KernelConfig, value: torch.Tensor) -> str:
    """The backend that runs for this `value`.

    Args:
        kernel: The user's choice.
        value: The tensor the kernel will read; only its device and dtype are looked at.

    Raises:
        BackendUnavailable: `kernel` names a backend that cannot run.
    """
    if kernel.backend == "auto":
        return "reference"
    status = backends()[kernel.backend]
    if not status.available:
        raise BackendUnavailable(f"kernel={kernel.backend} was asked for, but {status.reason}")
    return kernel.backend
