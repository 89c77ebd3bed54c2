"""Page-locking memory that is there already, and knowing when copies out of it are done."""

import os
from typing import Protocol

import torch

# cudaHostRegisterPortable: for every device of the process
_PORTABLE = 1


class CopyMark(Protocol):
    """A place in the order of a device's work."""

    def query(self) -> bool:
        """Whether the device has done all that came before."""


class PageLocker(Protocol):
    """Keeps pages in place, so that a device can read them by itself."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock memory that is not locked."""

    def unlock(self, address: int) -> None:
        """Undo `lock`. No device may read the memory any more."""

    def mark(self) -> CopyMark:
        """A mark behind all work that was given to the current stream."""

    def wait(self) -> None:
        """Wait until the devices have done what they were given."""


class CudaPageLocker:
    """A `PageLocker` for the GPUs of this process.

    Call it from the thread that captures CUDA graphs, and between captures: its calls would end one.

    Raises:
        ValueError: There is no GPU.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("pin_memory=true page-locks batches for a GPU, and PyTorch finds none. Set it to false")
        self._pid = os.getpid()

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock memory that is not locked.

        Raises:
            MemoryError: The system gives no more.
        """
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
        if int(code) != 0:
            raise MemoryError(
                f"cannot page-lock {num_bytes / 2**20:.0f} MiB for batches ({runtime.cudaGetErrorString(code)}). The "
                "machine may have too little memory for so many: lower data.num_workers or data.batch_size"
            )

    def unlock(self, address: int) -> None:
        """Undo `lock`. No device may read the memory any more.

        Raises:
            RuntimeError: The memory is not locked.
        """
        # a forked process has a copy of this object and no use of CUDA
        if os.getpid() != self._pid:
            return
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostUnregister(address)
        if int(code) != 0:
            raise RuntimeError(
                f"cannot unlock the memory of a batch ({runtime.cudaGetErrorString(code)}). An earlier fault of the "
                "GPU shows up here too: look for one above, or run with CUDA_LAUNCH_BLOCKING=1"
            )

    def mark(self) -> CopyMark:
        """A mark behind all work that was given to the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the devices have done what they were given."""
        if os.getpid() == self._pid:
            torch.cuda.synchronize()
