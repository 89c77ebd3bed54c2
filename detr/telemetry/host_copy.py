"""Numbers on their way from the device to the host."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor that the device makes when it gets there.

    Making one never waits. Reading waits until the device has come so far, which it has if the host has waited
    for any later work of the same stream since.

    Args:
        tensor: Of any shape and device; may change afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._values = tensor.detach().to("cpu", copy=True)

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values
