"""In which order an epoch takes the samples: shuffled, and by choice grouped by shape and with rare classes repeated.

An order follows from (seed, epoch) and the images a step of all ranks takes, and from nothing else: not from the rank,
not from the number of workers, not from where a run was resumed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# among how many steps' images those of like shape are put together: few, and batches are mixed; many, and the same
# images meet in every epoch
GROUPED_STEPS = 128


@dataclass(frozen=True)
class Sampling:
    """Which samples meet in a batch; every default is the recipe's.

    Attributes:
        group_by_aspect: Batches of images of like width / height, which need less padding.
        one_scale_a_batch: The images of a batch (on all ranks) draw one short side together.
        repeat_threshold: Images with a class that less than this share of the images has come several times an
            epoch, as in the LVIS paper (0.001 there); None: each comes once.
        passes: How often an epoch goes through the images, in a new order each time: for small data sets, whose
            epochs would be a handful of steps, with a pause for the first batch after each.
    """

    group_by_aspect: bool = False
    one_scale_a_batch: bool = False
    repeat_threshold: float | None = None
    passes: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.passes, int) or self.passes < 1:
            raise ValueError(f"data.sampling.passes must be a whole number of at least 1; got {self.passes}")
        if self.repeat_threshold is not None and not 0 < self.repeat_threshold <= 1:
            raise ValueError(
                "data.sampling.repeat_threshold must be a share of the images in (0, 1], or null; got "
                f"{self.repeat_threshold}"
            )


class EpochOrder:
    """The order of each epoch.

    Args:
        num_samples: The length of the dataset.
        seed: The seed of the run.
        step_size: Images that one step of all ranks takes, which are of like shape with `aspects`.
        aspects: (num_samples,) width / height of each image; None: batches are not grouped.
        repeat_factors: (num_samples,) how often each sample comes in a pass on average, at least 1; None: once.
        passes: Passes through the samples that make an epoch.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        step_size: int = 1,
        aspects: NDArray[np.float64] | None = None,
        repeat_factors: NDArray[np.float64] | None = None,
        passes: int = 1,
    ) -> None:
        for name, values in (("aspects", aspects), ("repeat_factors", repeat_factors)):
            if values is not None and len(values) != num_samples:
                raise ValueError(f"needs one of {name} a sample; got {len(values)} for {num_samples} samples")
        if repeat_factors is not None and not (repeat_factors >= 1).all():
            raise ValueError(f"repeat_factors must be at least 1; got {float(repeat_factors.min())}")
        self.step_size = step_size
        self._num_samples = num_samples
        self._seed = seed
        self._aspects = aspects
        self._repeat_factors = repeat_factors
        self._passes = passes
        self._pass_length = num_samples if repeat_factors is None else round(float(repeat_factors.sum()))

    def __len__(self) -> int:
        """The draws of an epoch, the same in each."""
        return self._passes * self._pass_length

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """(length,) which sample stands at each position of `epoch`."""
        generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
        order = np.concatenate([self._one_pass(generator) for _ in range(self._passes)])
        if self._aspects is not None:
            order = self._grouped(order, self._aspects, generator)
        return order

    def _one_pass(self, generator: torch.Generator) -> NDArray[np.int64]:
        order = torch.randperm(self._num_samples, generator=generator).numpy()
        return order if self._repeat_factors is None else self._repeated(order, self._repeat_factors, generator)

    def _repeated(
        self, order: NDArray[np.int64], factors: NDArray[np.float64], generator: torch.Generator
    ) -> NDArray[np.int64]:
        """Each sample floor or ceil of its factor times, at random so that the mean is the factor.

        Systematic sampling: marks at equal distances over the cumulated factors, so that each pass has the same
        length.
        """
        ends = np.cumsum(factors[order])
        ends *= self._pass_length / ends[-1]
        marks = np.floor(ends + float(torch.rand((), generator=generator)))
        # rounding must not move the last mark
        marks[-1] = self._pass_length
        counts = np.diff(marks, prepend=0).astype(np.int64)
        repeated = np.repeat(order, counts)
        return repeated[torch.randperm(len(repeated), generator=generator).numpy()]

    def _grouped(
        self, order: NDArray[np.int64], aspects: NDArray[np.float64], generator: torch.Generator
    ) -> NDArray[np.int64]:
        """The same samples, those of a step with like aspects; the steps themselves in random order."""
        num_full = len(order) // self.step_size * self.step_size
        full, rest = order[:num_full], order[num_full:]
        chunk = GROUPED_STEPS * self.step_size
        for first in range(0, num_full, chunk):
            part = full[first : first + chunk]
            full[first : first + chunk] = part[np.argsort(aspects[part], kind="stable")]
        steps = full.reshape(-1, self.step_size)
        steps = steps[torch.randperm(len(steps), generator=generator).numpy()]
        return np.concatenate((steps.reshape(-1), rest))


def repeat_factors(
    first_box: NDArray[np.int64], labels: NDArray[np.int64], num_classes: int, threshold: float
) -> NDArray[np.float64]:
    """How often each image should come in an epoch, by its rarest class (LVIS paper, appendix B.2).

    With f(c) the share of images that have class c: max over the image's classes of max(1, sqrt(threshold / f(c))).

    Args:
        first_box: (I + 1,) the boxes of image i are rows first_box[i] to first_box[i + 1].
        labels: (T,) the class of each box.
        num_classes: How many classes there are.
        threshold: The share of images under which a class is rare.

    Returns:
        (I,) factors of at least 1; 1 for images without boxes.
    """
    num_images = len(first_box) - 1
    image_of_box = np.repeat(np.arange(num_images), np.diff(first_box))
    pairs = np.unique(np.stack((image_of_box, labels), axis=1), axis=0)
    shares = np.bincount(pairs[:, 1], minlength=num_classes) / num_images
    with np.errstate(divide="ignore"):
        factor_of_class = np.maximum(1.0, np.sqrt(threshold / shares))
    factors = np.ones(num_images)
    np.maximum.at(factors, pairs[:, 0], factor_of_class[pairs[:, 1]])
    return factors


def seed_of(*parts: int) -> int:
    """A seed in [0, 2**63) that mixes non-negative integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1
