"""Memory that data workers write batches into, and that comes back to them.

A batch of 16 is tens of megabytes. To allocate, share, map and page-lock them for every batch takes longer than to
decode its images, and most of it in the main process. So each worker has a few buffers in shared memory, which
cross once; after that a message names a buffer. A buffer is in one of three states, kept in shared memory too:

    FREE  the worker's to write into; it makes it SENT
    SENT  written, or on its way; the main process makes it HELD when it comes
    HELD  tensors of the main process lie in it; when they are gone, and the device has copied, it is FREE again

One process at a time may change a state, so there are no locks, and nobody ever waits: a worker without a free buffer
sends a batch in memory of its own. An iteration that is left loses the batches on their way. Therefore
iterations are counted, and at its first batch of a new one a worker takes back what is still SENT.
"""

import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detr.data.page_locks import CopyMark, PageLocker
from detr.data.shared_memory import new_shared_memory

# two batches of a worker wait to be taken, one is written and a consumer has three or four; the rest is for consumers
# that keep several
MAX_BUFFERS_A_WORKER = 8
_ROUND_TO_BYTES = 2**20

FREE, SENT, HELD = 0, 1, 2


class BufferStates:
    """What the main process and its workers know of the buffers together.

    Args:
        num_workers: Of the loader.
    """

    def __init__(self, num_workers: int) -> None:
        self._states = torch.full((num_workers, MAX_BUFFERS_A_WORKER), FREE, dtype=torch.uint8).share_memory_()
        self._iteration = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._largest_bytes = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, key: tuple[int, int]) -> int:
        """The state of a (worker, slot)."""
        return int(self._states[key])

    def __setitem__(self, key: tuple[int, int], state: int) -> None:
        self._states[key] = state

    @property
    def iteration(self) -> int:
        """How many iterations have begun."""
        return int(self._iteration)

    def begin_iteration(self) -> None:
        """Say, in the main process, that no batch will be taken that is on its way now."""
        self._iteration += 1

    def largest_bytes(self, num_bytes: int) -> int:
        """The size to give a new buffer that needs `num_bytes`: that of the largest batch so far.

        Each buffer would grow to it in time, by being replaced and locked again and again. Two workers that call at
        once may overlook each other's batch, which costs one more replacement.
        """
        rounded = -(-num_bytes // _ROUND_TO_BYTES) * _ROUND_TO_BYTES
        largest = max(rounded, int(self._largest_bytes))
        self._largest_bytes.fill_(largest)
        return largest


@dataclass(frozen=True)
class SharedPixels:
    """Where the pixels of a batch lie, on its way to the main process.

    Attributes:
        worker: Whose buffer it is.
        slot: Which of its.
        shape: (N, H, W) of the batch, whose N * H * W * 3 bytes begin the buffer, channels last.
        memory: The buffer, uint8, where the main process does not have it yet.
    """

    worker: int
    slot: int
    shape: tuple[int, int, int]
    memory: Tensor | None


@dataclass
class _Buffer:
    memory: Tensor
    is_known: bool = False


class WorkerBuffers:
    """The buffers of one worker, in that worker.

    Args:
        states: Of all buffers.
        worker: The worker's number.
    """

    def __init__(self, states: BufferStates, worker: int) -> None:
        self._states = states
        self._worker = worker
        self._buffers: list[_Buffer] = []
        self._iteration = 0

    def take(self, num_bytes: int) -> int | None:
        """The slot of a buffer with room for a batch, or None: all are in use. It counts as sent from here on.

        Raises:
            OSError: There is no shared memory left for a new buffer.
        """
        self._take_back_lost()
        free = [slot for slot in range(len(self._buffers)) if self._states[self._worker, slot] == FREE]
        with_room = [slot for slot in free if self._num_bytes(slot) >= num_bytes]
        if with_room:
            slot = min(with_room, key=self._num_bytes)
        elif free:
            slot = min(free, key=self._num_bytes)
            self._buffers[slot] = self._new_buffer(num_bytes)
        elif len(self._buffers) < MAX_BUFFERS_A_WORKER:
            slot = len(self._buffers)
            self._buffers.append(self._new_buffer(num_bytes))
        else:
            return None
        self._states[self._worker, slot] = SENT
        return slot

    def memory(self, slot: int) -> Tensor:
        """The uint8 memory of a slot."""
        return self._buffers[slot].memory

    def send(self, slot: int, shape: tuple[int, int, int]) -> SharedPixels:
        """What to tell the main process of a batch of `shape` (N, H, W) that lies in a slot."""
        buffer = self._buffers[slot]
        memory = None if buffer.is_known else buffer.memory
        buffer.is_known = True
        return SharedPixels(self._worker, slot, shape, memory)

    def _take_back_lost(self) -> None:
        iteration = self._states.iteration
        if iteration == self._iteration:
            return
        self._iteration = iteration
        for slot, buffer in enumerate(self._buffers):
            if self._states[self._worker, slot] == SENT:
                # its memory may have been lost with it
                buffer.is_known = False
                self._states[self._worker, slot] = FREE

    def _new_buffer(self, num_bytes: int) -> _Buffer:
        return _Buffer(new_shared_memory(self._states.largest_bytes(num_bytes)))

    def _num_bytes(self, slot: int) -> int:
        return self._buffers[slot].memory.numel()


class ReceivedBuffers:
    """The buffers of all workers, in the main process.

    Copies to a device must be given to the stream that is the current one when the next batch is asked for: what the
    device has done by then decides when a buffer is written again. A tensor that lives keeps its buffer, however long.

    Args:
        states: Of all buffers.
        page_locker: Locks each buffer when it comes; None: no device copies by itself, and what no tensor needs is
            free at once. Buffers are unlocked when this object goes; batches that are left then stay readable.
    """

    def __init__(self, states: BufferStates, page_locker: PageLocker | None) -> None:
        self._states = states
        self._page_locker = page_locker
        self._memory: dict[tuple[int, int], NDArray[np.uint8]] = {}
        # filled whenever a tensor dies, in whatever thread
        self._released: deque[tuple[int, int]] = deque()
        self._leaving: deque[tuple[CopyMark, list[tuple[int, int]]]] = deque()
        if page_locker is not None:
            # when a program ends the system unlocks
            weakref.finalize(self, _unlock_all, self._memory, page_locker).atexit = False

    def pixels(self, sent: SharedPixels) -> Tensor:
        """The pixels of a batch, (N, 3, H, W) uint8 in channels last memory, with nothing copied.

        Raises:
            MemoryError: A new buffer cannot be page-locked.
        """
        key = (sent.worker, sent.slot)
        if sent.memory is not None:
            self._replace(key, sent.memory)
        self._states[key] = HELD
        N, H, W = sent.shape
        # an array of its own: it lives as long as the last tensor that lies in it
        view = self._memory[key][: N * H * W * 3]
        weakref.finalize(view, self._released.append, key).atexit = False
        return torch.from_numpy(view).view(N, H, W, 3).permute(0, 3, 1, 2)

    def recycle(self) -> None:
        """Give back the buffers that no tensor lies in and that no device reads any more; waits for nothing."""
        released = [self._released.popleft() for _ in range(len(self._released))]
        if self._page_locker is None:
            self._free(released)
            return
        if released:
            self._leaving.append((self._page_locker.mark(), released))
        while self._leaving and self._leaving[0][0].query():
            self._free(self._leaving.popleft()[1])

    def _free(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            self._states[key] = FREE

    def _replace(self, key: tuple[int, int], memory: Tensor) -> None:
        """Take a new buffer for a slot, whose old one the worker has found free."""
        old = self._memory.pop(key, None)
        new = memory.numpy()
        if self._page_locker is not None:
            if old is not None:
                self._page_locker.unlock(old.ctypes.data)
            self._page_locker.lock(new.ctypes.data, new.nbytes)
        self._memory[key] = new


def _unlock_all(memory: dict[tuple[int, int], NDArray[np.uint8]], page_locker: PageLocker) -> None:
    page_locker.wait()
    for array in memory.values():
        page_locker.unlock(array.ctypes.data)
