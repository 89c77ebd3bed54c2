"""New memory that processes share, and what to say where none is left."""

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

# where Linux keeps what processes share; systems without it have no such limit
SHARED_FOLDER = Path("/dev/shm")


def new_shared_memory(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 of any content, which other processes may map.

    Call it in the worker's own thread: multiprocessing sends from another one, where memory that cannot be shared is a
    batch that never comes.

    Raises:
        OSError: There is not so much left.
    """
    # PyTorch reserves what it takes, so that a lack is an error and no SIGBUS, but it leaves a file behind then
    space = _space_bytes()
    if space is not None and space[1] < num_bytes:
        raise _full(num_bytes)
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    try:
        return memory.share_memory_()
    except RuntimeError as error:
        # another process was faster
        if f"({errno.ENOSPC})" not in str(error):
            raise
        raise _full(num_bytes) from error


def describe_shared_memory() -> str:
    """How much of it there is, and how to get more."""
    space = _space_bytes()
    if space is None:
        return "give it more, or lower data.num_workers or data.batch_size"
    total, free = (num_bytes // 2**20 for num_bytes in space)
    return (
        f"{SHARED_FOLDER} holds {total} MiB, {free} of them free now. Containers get 64 unless told otherwise: "
        "start them with `docker run --shm-size=8g` or `--ipc=host`; or lower data.num_workers or data.batch_size"
    )


def _space_bytes() -> tuple[int, int] | None:
    """All and what is free; None: the system has no such folder."""
    if not SHARED_FOLDER.is_dir():
        return None
    stats = os.statvfs(SHARED_FOLDER)
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize


def _full(num_bytes: int) -> OSError:
    return OSError(
        f"a data worker needs {-(-num_bytes // 2**20)} MiB more of shared memory, and there is not so much left: "
        f"{describe_shared_memory()}"
    )
