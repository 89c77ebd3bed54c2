"""Which samples a rank draws, in which order, and with which random seed.

A sampler yields `Draw`s: the index of a sample together with the seed of its augmentation. The seed depends on
(run seed, epoch, position in the epoch) alone, so that the same pixels come out whatever the number of workers
or ranks, and wherever in an epoch a run was resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Draw:
    """One sample to load.

    Attributes:
        index: Its index in the dataset.
        seed: What to seed the random generators with before loading it; in [0, 2**63).
    """

    index: int
    seed: int


class TrainSampler(Sampler[Draw]):
    """A rank's share of a shuffled epoch.

    The order is a permutation drawn from (seed, epoch). Rank r of W takes its positions r, r + W, r + 2W, ...:
    one step of W ranks at batch B sees the same samples as one step of one rank at batch W * B. Every rank gets
    the same number; the up to W - 1 samples at the end of the order sit out this epoch (others the next).

    Args:
        num_samples: The length of the dataset.
        seed: The seed of the run.
        rank: Which share.
        world_size: The number of shares.
    """

    def __init__(self, num_samples: int, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        _check_rank(rank, world_size)
        self._num_samples = num_samples
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch to iterate over next.

        Args:
            epoch: Counted from 0.
            start: How many samples of the epoch all ranks together have already drawn: the position to
                resume from. It does not depend on the number of ranks.
        """
        if epoch < 0 or not 0 <= start <= self._num_samples:
            raise ValueError(
                f"needs epoch >= 0 and 0 <= start <= {self._num_samples} samples; got epoch {epoch}, start {start}"
            )
        self._epoch = epoch
        self._start = start

    def __len__(self) -> int:
        """The draws of this rank from `start` to the end of the epoch."""
        return (self._num_samples - self._start) // self._world_size

    def __iter__(self) -> Iterator[Draw]:
        epoch = self._epoch
        generator = torch.Generator().manual_seed(_seed_of(self._seed, epoch))
        order = torch.randperm(self._num_samples, generator=generator)
        first = self._start + self._rank
        for position in range(first, first + len(self) * self._world_size, self._world_size):
            yield Draw(int(order[position]), _seed_of(self._seed, epoch, position))


class EvalSampler(Sampler[Draw]):
    """A rank's share of the dataset in order: each sample on exactly one rank, none repeated to even them out.

    Ranks may so differ by one sample, or have none: evaluation must not run collectives in the loop.

    Args:
        num_samples: The length of the dataset.
        rank: Which share.
        world_size: The number of shares.
    """

    def __init__(self, num_samples: int, *, rank: int = 0, world_size: int = 1) -> None:
        _check_rank(rank, world_size)
        self._indices = range(rank, num_samples, world_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Draw]:
        for index in self._indices:
            yield Draw(index, seed=index)


def _seed_of(*parts: int) -> int:
    """A seed in [0, 2**63) that mixes non-negative integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; got rank {rank} of world size {world_size}")
