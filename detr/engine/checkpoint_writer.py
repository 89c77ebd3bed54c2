"""Checkpoints of a run written beside its steps, by one thread."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from detr.engine.checkpoint import Checkpoint, checkpoint_payload, write_payload
from detr.engine.checkpoint_files import copy_file
from detr.engine.run_folder import RunFolder
from detr.engine.run_lock import RunLock


class CheckpointWriter:
    """Keeps last.pt, best.pt and the checkpoints before them.

    `save` takes a copy of the tensors and returns; a thread writes it. A GPU's tensors are copied in the order of
    its work, so the host does not wait and no GPU memory is taken. Writing takes about 2 s a GB, during which
    training goes on.

    Args:
        folder: Of the run.
        keep_last: Checkpoints to keep, the newest (last.pt) included; the others are step_*.pt.
        lock: On the folder; None where nobody else writes there.
    """

    def __init__(self, folder: RunFolder, *, keep_last: int, lock: RunLock | None = None) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._lock = lock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Checkpoint, *, is_best: bool) -> None:
        """Begin to write `checkpoint`; waits for the one before.

        Raises:
            OSError: The one before could not be written, or the folder is not ours any more.
            TypeError: See `save_checkpoint`.
        """
        self.wait()
        if self._lock is not None:
            self._lock.require()
        payload, ready = host_copy(checkpoint_payload(checkpoint))
        self._pending = self._pool.submit(self._write, payload, ready, is_best)

    def wait(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            OSError: It could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile; does not wait for one under way."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _write(self, payload: dict[str, Any], ready: "torch.cuda.Event | None", is_best: bool) -> None:
        if ready is not None:
            ready.synchronize()
        last = self._folder.last
        if is_best:
            # best first: a run killed in between evaluates again, instead of missing its best for good
            write_payload(payload, self._folder.best)
            copy_file(self._folder.best, last)
        else:
            # last.pt is the newest at every moment
            write_payload(payload, last)
        if self._keep_last > 1:
            copy_file(last, self._folder.step_checkpoint(payload["global_step"]))
        for old in self._folder.step_checkpoints()[self._keep_last if self._keep_last > 1 else 0 :]:
            old.unlink()


def host_copy(payload: dict[str, Any]) -> "tuple[dict[str, Any], torch.cuda.Event | None]":
    """A copy of nested containers with their tensors on the host, and when it is complete (None: it is)."""
    is_on_gpu = False

    def copied(value: Any) -> Any:
        nonlocal is_on_gpu
        if isinstance(value, Tensor):
            if value.device.type != "cuda":
                # any other device is waited for
                return value.detach().to("cpu", copy=True)
            is_on_gpu = True
            # in the memory format of the original: moments of a channels last weight are channels last
            pinned = torch.empty_like(value, device="cpu", pin_memory=True)
            return pinned.copy_(value.detach(), non_blocking=True)
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copied(item) for item in value)
        return value

    copy = copied(payload)
    if not is_on_gpu:
        return copy, None
    ready = torch.cuda.Event()
    ready.record()
    return copy, ready
