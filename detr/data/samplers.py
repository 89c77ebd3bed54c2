"""Which samples a rank draws, in which order, and with which random seed.

A sampler yields `Draw`s: the index of a sample together with the seed of its augmentation. The seed depends on
(run seed, epoch, position in the epoch) alone, so that the same pixels come out whatever the number of workers
or ranks, and wherever in an epoch a run was resumed: skipping k batches is `set_epoch(epoch, start=k * step size)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import Sampler

from detr.data.epoch_order import EpochOrder, seed_of


@dataclass(frozen=True)
class Draw:
    """One sample to load.

    Attributes:
        index: Its index in the dataset.
        seed: What to seed the random generators with before loading it; in [0, 2**63).
        batch_draw: A random number in [0, 1) that the samples of a step share; None: they share none.
    """

    index: int
    seed: int
    batch_draw: float | None = None


class TrainSampler(Sampler[Draw]):
    """A rank's share of an epoch.

    Rank r of W takes the positions r, r + W, r + 2W, ... of the order: one step of W ranks at batch B sees the
    same samples as one step of one rank at batch W * B. Every rank gets the same number; the up to W - 1 samples at
    the end of the order sit out this epoch (others the next).

    Args:
        order: Of all samples; its `step_size` is the images that all ranks take together in a step.
        seed: The seed of the run.
        rank: Which share.
        world_size: The number of shares.
        one_scale_a_batch: Whether the samples of a step share a random number, for their scale.
    """

    def __init__(
        self, order: EpochOrder, *, seed: int, rank: int = 0, world_size: int = 1, one_scale_a_batch: bool = False
    ) -> None:
        _check_rank(rank, world_size)
        self._order = order
        self.num_samples = len(order)
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._one_scale_a_batch = one_scale_a_batch
        self._epoch = 0
        self._start = 0

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch to iterate over next.

        Args:
            epoch: Counted from 0.
            start: How many samples of the epoch all ranks together have already drawn: the position to
                resume from. It does not depend on the number of ranks.
        """
        if epoch < 0 or not 0 <= start <= self.num_samples:
            raise ValueError(
                f"needs epoch >= 0 and 0 <= start <= {self.num_samples} samples; got epoch {epoch}, start {start}"
            )
        self._epoch = epoch
        self._start = start

    def __len__(self) -> int:
        """The draws of this rank from `start` to the end of the epoch."""
        return (self.num_samples - self._start) // self._world_size

    def __iter__(self) -> Iterator[Draw]:
        epoch = self._epoch
        order = self._order.indices(epoch)
        first = self._start + self._rank
        for position in range(first, first + len(self) * self._world_size, self._world_size):
            batch_draw = self._batch_draw(epoch, position) if self._one_scale_a_batch else None
            yield Draw(int(order[position]), seed_of(self._seed, epoch, position), batch_draw)

    def _batch_draw(self, epoch: int, position: int) -> float:
        # a word more than the seeds of samples have, so that none of them is met again
        return seed_of(self._seed, epoch, position // self._order.step_size, 1) / 2**63


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
        self.num_samples = num_samples
        self._indices = range(rank, num_samples, world_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Draw]:
        for index in self._indices:
            yield Draw(index, seed=index)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; got rank {rank} of world size {world_size}")
