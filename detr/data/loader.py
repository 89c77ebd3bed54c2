"""Batches from a dataset: sharded, seeded by sample, padded.

Before each sample the generators of torch, numpy and `random` are seeded from (run seed, epoch, position in the
epoch), and in the main process put back afterwards. Pixels so depend neither on the number of workers nor on the
rank, and loading in the main process leaves the random numbers of training alone.
"""

import random
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from detr.data.collate import PackedBatch, collate
from detr.data.dataset import DetectionDataset, Sample
from detr.data.epoch_order import EpochOrder, Sampling
from detr.data.page_locks import CudaPageLocker, PageLocker
from detr.data.recycled import BufferStates, ReceivedBuffers, WorkerBuffers
from detr.data.samplers import Draw, EvalSampler, TrainSampler
from detr.data.workers import WorkerLog, ignore_stop_signals, start_method
from detr.structures import Batch

# a process that dumps its core is dead only afterwards
SECONDS_UNTIL_A_DEATH_IS_KNOWN = 5.0


class DetectionLoader:
    """Iterates over the batches of one rank, an epoch an iteration.

    Args:
        dataset: Where the samples come from.
        sampler: Which samples, and their seeds.
        batch_size: Samples a batch.
        num_workers: Worker processes; 0 loads in this one.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        drop_last: Leave out a last batch that is not full.
        page_locker: Locks the memory that workers write batches into, for asynchronous copies to a GPU; see
            `ReceivedBuffers` for what such copies must heed. Batches that are loaded in this process, or that found no
            buffer free, lie in ordinary memory all the same.
    """

    def __init__(
        self,
        dataset: DetectionDataset,
        sampler: TrainSampler | EvalSampler,
        *,
        batch_size: int,
        num_workers: int,
        pad_to: int,
        drop_last: bool,
        page_locker: PageLocker | None,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"needs batch_size >= 1 and num_workers >= 0; got batch_size {batch_size}, num_workers {num_workers}"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self._worker_log = WorkerLog(num_workers)
        self._buffer_states = BufferStates(num_workers)
        self._buffers = ReceivedBuffers(self._buffer_states, page_locker)
        self._batches = _Batches(
            SeededDataset(dataset, self._worker_log),
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            multiprocessing_context=start_method() if num_workers else None,
            collate_fn=CollateOrFail(pad_to, self._buffer_states),
            drop_last=drop_last,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_stop_signals,
            # its own generator, or each epoch would take a number from the global one
            generator=torch.Generator().manual_seed(0),
        )

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch to iterate over next; see `TrainSampler.set_epoch`.

        Args:
            epoch: Counted from 0.
            start: How many samples all ranks together have already trained on in it.
        """
        if not isinstance(self.sampler, TrainSampler):
            raise ValueError("evaluation has no epochs: its order never changes")
        self.sampler.set_epoch(epoch, start=start)

    @property
    def num_samples(self) -> int:
        """Of a whole epoch, all ranks together."""
        return self.sampler.num_samples

    def __len__(self) -> int:
        """The batches left in this iteration."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Raises:
            ValueError: A sample cannot be loaded. The message is that of the dataset, whatever process read it.
            OSError: Likewise; or there is no shared memory left.
            ChildProcessError: A worker died; names the sample it loaded.
            MemoryError: The memory of batches cannot be page-locked.
            RuntimeError: Another iteration has begun since, to which the workers belong now.
        """
        with self.naming_dead_workers():
            self._buffer_states.begin_iteration()
            iteration = self._buffer_states.iteration
            batches = iter(self._batches)
            while True:
                if self._buffer_states.iteration != iteration:
                    raise RuntimeError(
                        "this iteration over a loader cannot go on: another one has begun since. Iterate one after the "
                        "other, or build two loaders"
                    )
                self._buffers.recycle()
                batch: Batch | PackedBatch | LoadFailure | None = next(batches, None)
                if batch is None:
                    return
                if isinstance(batch, LoadFailure):
                    error = batch.error
                    try:
                        raise error
                    finally:
                        # its trace leads here: a circle would keep this loader until the garbage collection, and
                        # workers whose queues are found by that end 5 s later each
                        del error, batch
                # nothing here may hold on to what is yielded: it could not be recycled
                yield batch.unpack(self._buffers) if isinstance(batch, PackedBatch) else batch

    @contextmanager
    def naming_dead_workers(self) -> Iterator[None]:
        """Put around what is done with the batches: PyTorch interrupts the main process wherever it is.

        A worker that dies while it hands over a batch breaks the connection first: that error waits for PyTorch's word,
        which the end of a child process brings.

        Raises:
            ChildProcessError: A worker died; names the sample it loaded.
        """
        try:
            try:
                yield
            except (ConnectionError, EOFError):
                time.sleep(SECONDS_UNTIL_A_DEATH_IS_KNOWN)  # PyTorch's handler of SIGCHLD raises from here
                raise
        except RuntimeError as error:
            message = self._worker_log.explain(error, self.dataset)
            if message is None:
                raise
            raise ChildProcessError(message) from error


class _Batches(DataLoader[Any]):
    """PyTorch's, without its word about workers and cores, which every loader and every iterator would say anew."""

    def check_worker_number_rationality(self) -> None:
        """Nothing: the tools say it, once a run."""


@dataclass(frozen=True)
class LoadFailure:
    """A sample that could not be loaded, on its way to the main process.

    An error that leaves a data worker arrives wrapped in a copy of its stack trace; one that travels as a value
    arrives as it is. `HYDRA_FULL_ERROR=1` still shows where it came from.
    """

    error: ValueError | OSError

    @classmethod
    def of(cls, error: ValueError | OSError) -> "LoadFailure":
        """A copy of `error` that can be sent, of a class that every process knows, with the stack trace as a note."""
        # what does not pickle would be lost in the thread that sends, and the main process would wait forever
        kind: type[ValueError | OSError] = OSError if isinstance(error, OSError) else ValueError
        if kind is OSError and type(error).__module__ == "builtins":
            # such as FileNotFoundError; all of them are made of one message, unlike those of ValueError
            kind = type(error)
        copy = kind(str(error))
        copy.add_note("".join(traceback.format_exception(error)))
        return cls(copy)


class SeededDataset(Dataset[Sample | LoadFailure]):
    """Loads the sample of a `Draw` with all random generators seeded by it, and restores them."""

    def __init__(self, dataset: DetectionDataset, worker_log: WorkerLog) -> None:
        self._dataset = dataset
        self._worker_log = worker_log

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, draw: Draw) -> Sample | LoadFailure:
        self._worker_log.note(draw.index)
        if get_worker_info() is not None:
            # a worker draws for nobody else
            return self._load(draw)
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()  # noqa: NPY002 (custom transforms may use it)
        python_state = random.getstate()
        try:
            return self._load(draw)
        finally:
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)

    def _load(self, draw: Draw) -> Sample | LoadFailure:
        # torch.manual_seed would reseed the GPUs as well
        torch.default_generator.manual_seed(draw.seed)
        np.random.seed(draw.seed % 2**32)  # noqa: NPY002
        random.seed(draw.seed)
        try:
            return self._dataset.load(draw.index, draw.batch_draw)
        except (ValueError, OSError) as error:
            return LoadFailure.of(error)


class CollateOrFail:
    """Makes a batch of samples, or hands on the first failure among them.

    In a worker the batch is packed into a buffer of that worker, ready to be sent.

    Args:
        pad_to: See `collate`.
        states: Of the workers' buffers.
    """

    def __init__(self, pad_to: int, states: BufferStates) -> None:
        self._pad_to = pad_to
        self._states = states
        # a worker has its own copy of this object
        self._buffers: WorkerBuffers | None = None

    def __call__(self, samples: Sequence[Sample | LoadFailure]) -> Batch | PackedBatch | LoadFailure:
        loaded = []
        for sample in samples:
            if isinstance(sample, LoadFailure):
                return sample
            loaded.append(sample)
        worker = get_worker_info()
        if worker is None:
            return collate(loaded, self._pad_to)
        if self._buffers is None:
            self._buffers = WorkerBuffers(self._states, worker.id)
        try:
            return PackedBatch.pack(loaded, self._pad_to, self._buffers)
        except OSError as error:
            return LoadFailure.of(error)


def build_train_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    num_workers: int,
    pad_to: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    sampling: Sampling | None = None,
) -> DetectionLoader:
    """Shuffled full batches for training; the same number on each rank.

    Args:
        dataset: What to train on.
        batch_size: Samples a batch and rank.
        num_workers: Worker processes of this rank.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        seed: The seed of order and augmentation; the same on every rank.
        rank: This rank.
        world_size: The number of ranks.
        pin_memory: Page-lock the memory of batches for asynchronous copies to a GPU; see `DetectionLoader`.
        sampling: Which samples meet in a batch; None: chance alone decides.

    Raises:
        ValueError: The dataset does not fill one batch of all ranks, or does not know what `sampling` needs; or
            `pin_memory` without a GPU.
    """
    sampling = sampling or Sampling()
    if len(dataset) < batch_size * world_size:
        raise ValueError(
            f"one training step takes {batch_size * world_size} images (batch size {batch_size} x {world_size} "
            f"ranks), but the training set has {len(dataset)}. Lower data.batch_size or add images"
        )
    order = EpochOrder(
        len(dataset),
        seed=seed,
        step_size=batch_size * world_size,
        aspects=dataset.aspects() if sampling.group_by_aspect else None,
        repeat_factors=(
            None if sampling.repeat_threshold is None else dataset.repeat_factors(sampling.repeat_threshold)
        ),
        passes=sampling.passes,
    )
    return DetectionLoader(
        dataset,
        TrainSampler(order, seed=seed, rank=rank, world_size=world_size, one_scale_a_batch=sampling.one_scale_a_batch),
        batch_size=batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        drop_last=True,
        page_locker=CudaPageLocker() if pin_memory else None,
    )


def build_val_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    num_workers: int,
    pad_to: int,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> DetectionLoader:
    """Every sample once, in order, over all ranks; the last batch may be smaller. See `build_train_loader`."""
    return DetectionLoader(
        dataset,
        EvalSampler(len(dataset), rank=rank, world_size=world_size),
        batch_size=batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        drop_last=False,
        page_locker=CudaPageLocker() if pin_memory else None,
    )
