"""Data worker processes: which sample each is at, and what signals mean to them."""

import multiprocessing
import os
import re
import signal
import sys
import threading

import torch
from torch.utils.data import get_worker_info

from detr.data.coco import CocoDataset
from detr.data.dataset import DetectionDataset
from detr.data.shared_memory import describe_shared_memory


class WorkerLog:
    """Which sample each data worker loads, in memory that outlives the worker.

    Args:
        num_workers: Of the loader; with none there is nothing to note.
    """

    def __init__(self, num_workers: int) -> None:
        # rows of (pid, index); written by one worker each
        self._rows = torch.full((num_workers, 2), -1, dtype=torch.int64).share_memory_() if num_workers else None

    def note(self, index: int) -> None:
        """Say, in a worker, that it begins to load sample `index`."""
        worker = get_worker_info()
        if worker is not None and self._rows is not None:
            self._rows[worker.id, 0] = os.getpid()
            self._rows[worker.id, 1] = index

    def explain(self, error: RuntimeError, dataset: DetectionDataset) -> str | None:
        """What to tell the user if `error` is PyTorch's word that some of these workers have died; else None."""
        text = str(error)
        found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
        if found is None:
            return None
        pids = {int(pid) for pid in found[1].split(",")}
        rows = [] if self._rows is None else self._rows.tolist()
        samples = [_describe(dataset, index) for pid, index in rows if pid in pids]
        if not samples:
            return None
        if "Bus error" in text:
            cause = f"Mostly shared memory is used up then: {describe_shared_memory()}"
        else:
            cause = "Mostly the machine's memory is used up then: lower data.num_workers"
        return (
            f"a data worker died ({text.splitlines()[0]}) while it loaded {', '.join(samples)}. {cause}. If it is "
            "always the same sample, look at its file; data.num_workers=0 loads it in the main process"
        )


def start_method() -> str | None:
    """How workers start: as the program has chosen with multiprocessing.set_start_method; else forked on Linux.

    Not by Python's default, from 3.14 on a fork server: forked workers need not import PyTorch again, the dataset
    is not pickled, and signals to the whole job spare them, see `ignore_stop_signals`. None: the default.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return "fork" if chosen is None and sys.platform == "linux" else chosen


def ignore_stop_signals(worker_id: int) -> None:
    """For a worker: the main process decides when it ends.

    Schedulers signal every process of a job. Workers that died of it would take the checkpoint with them that the
    main process then makes. A SIGTERM of the main process itself still ends a worker: Python sends one to those that
    are left when it exits, and waits for them.

    A forked worker has one thread here. One that is spawned or comes from a fork server has imported libraries by now:
    if they began threads, as with OMP_NUM_THREADS above 1, SIGTERM may reach one of those and end the worker.
    """
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        # without it nobody can tell whose signal it is
        return
    main = multiprocessing.parent_process()
    assert main is not None, "only for worker processes"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # not os.getppid(): with the start method "forkserver" that is the server
    threading.Thread(target=_exit_when_told_by, args=(main.pid,), daemon=True).start()


def _exit_when_told_by(main: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)


def _describe(dataset: DetectionDataset, index: int) -> str:
    where = f" ({dataset.image_path(index)})" if isinstance(dataset, CocoDataset) else ""
    return f"sample {index}{where}"
