"""Batches from a dataset: sharded, seeded by sample, padded.

Before each sample the generators of torch, numpy and `random` are seeded from (run seed, epoch, position in
the epoch), and put back afterwards. Pixels so depend neither on the number of workers nor on the rank, and
loading in the main process leaves the random numbers of training alone.
"""

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from detr.data.collate import collate
from detr.data.dataset import DetectionDataset, Sample
from detr.data.samplers import Draw, EvalSampler, TrainSampler
from detr.structures import Batch


class DetectionLoader:
    """Iterates over the batches of one rank, an epoch an iteration.

    Args:
        dataset: Where the samples come from.
        sampler: Which samples, and their seeds.
        batch_size: Samples a batch.
        num_workers: Worker processes; 0 loads in this one.
        pad_to: Round padded heights and widths up to a multiple of this many pixels.
        drop_last: Leave out a last batch that is not full.
        pin_memory: Put batches into page-locked memory, for asynchronous copies to a GPU.
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
        pin_memory: bool,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"needs batch_size >= 1 and num_workers >= 0; got batch_size {batch_size}, num_workers {num_workers}"
            )
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self._batches: DataLoader[Sample] = DataLoader(
            SeededDataset(dataset),
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=partial(collate, pad_to=pad_to),
            drop_last=drop_last,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
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

    def __len__(self) -> int:
        """The batches left in this iteration."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class SeededDataset(Dataset[Sample]):
    """Loads the sample of a `Draw` with all random generators seeded by it, and restores them."""

    def __init__(self, dataset: DetectionDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, draw: Draw) -> Sample:
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()  # noqa: NPY002 (custom transforms may use it)
        python_state = random.getstate()
        # torch.manual_seed would reseed the GPUs as well
        torch.default_generator.manual_seed(draw.seed)
        np.random.seed(draw.seed % 2**32)  # noqa: NPY002
        random.seed(draw.seed)
        try:
            return self._dataset[draw.index]
        finally:
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


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
        pin_memory: Put batches into page-locked memory.

    Raises:
        ValueError: The dataset does not fill one batch of all ranks.
    """
    if len(dataset) < batch_size * world_size:
        raise ValueError(
            f"one training step takes {batch_size * world_size} images (batch size {batch_size} x {world_size} "
            f"ranks), but the training set has {len(dataset)}. Lower data.batch_size or add images"
        )
    return DetectionLoader(
        dataset,
        TrainSampler(len(dataset), seed=seed, rank=rank, world_size=world_size),
        batch_size=batch_size,
        num_workers=num_workers,
        pad_to=pad_to,
        drop_last=True,
        pin_memory=pin_memory,
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
        pin_memory=pin_memory,
    )
