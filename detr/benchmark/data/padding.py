"""How much of a batch is padding, and how many padded shapes occur, with and without grouping."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from detr.benchmark.data.speed import MAX_SIZE, SIZES
from detr.data import Draw, EpochOrder, Sampling, TrainSampler, detr_augmentation

# (h, w) of 121 photos of COCO 2017, train and val, and how many of them have it
COCO_SIZES: dict[tuple[int, int], int] = {
    (480, 640): 28,
    (427, 640): 13,
    (640, 427): 9,
    (375, 500): 7,
    (640, 480): 7,
    (428, 640): 6,
    (426, 640): 5,
    (425, 640): 3,
    (333, 500): 2,
    **dict.fromkeys(
        (
            (488, 640),
            (640, 565),
            (640, 512),
            (640, 416),
            (481, 640),
            (573, 640),
            (536, 640),
            (600, 600),
            (491, 640),
            (218, 640),
            (640, 446),
            (640, 516),
            (313, 500),
            (484, 640),
            (640, 520),
            (407, 640),
            (593, 600),
            (359, 640),
            (336, 448),
            (382, 640),
            (500, 389),
            (346, 500),
            (433, 640),
            (500, 376),
            (463, 640),
            (478, 640),
            (483, 640),
            (230, 352),
            (640, 634),
            (449, 640),
            (388, 640),
            (640, 640),
            (432, 640),
            (640, 425),
            (500, 351),
            (462, 640),
            (511, 640),
            (500, 375),
            (423, 500),
            (371, 640),
            (400, 640),
        ),
        1,
    ),
}


@dataclass(frozen=True)
class PaddingRow:
    """One way of making batches.

    Attributes:
        batch_size: Images a batch.
        sampling: What meets in one.
        pad_to: Padded sides are multiples of this many pixels.
        waste: The share of the batches' pixels that is padding.
        num_shapes: Different padded (H, W).
        num_batches: Of so many batches.
    """

    batch_size: int
    sampling: Sampling
    pad_to: int
    waste: float
    num_shapes: int
    num_batches: int


def measure_padding(
    sizes: NDArray[np.int64],
    *,
    batch_size: int,
    sampling: Sampling,
    pad_to: Sequence[int] = (1,),
    num_batches: int = 1000,
    seed: int = 0,
) -> list[PaddingRow]:
    """Make batches of images of some sizes under the augmentation of DETR, without their pixels.

    Args:
        sizes: (I, 2) the (h, w) of each image of the dataset; I >= batch_size * num_batches.
        batch_size: Images a batch.
        sampling: What meets in a batch.
        pad_to: One row is made for each.
        num_batches: How many.
        seed: Of order and augmentation.
    """
    if len(sizes) < batch_size * num_batches:
        raise ValueError(f"{num_batches} batches of {batch_size} need as many images; got {len(sizes)}")
    order = EpochOrder(
        len(sizes),
        seed=seed,
        step_size=batch_size,
        aspects=sizes[:, 1] / sizes[:, 0] if sampling.group_by_aspect else None,
    )
    sampler = TrainSampler(order, seed=seed, one_scale_a_batch=sampling.one_scale_a_batch)
    transform = detr_augmentation(SIZES, MAX_SIZE)

    def transformed_size(draw: Draw) -> tuple[int, int]:
        torch.default_generator.manual_seed(draw.seed)
        h, w = sizes[draw.index].tolist()
        # a meta tensor has a shape and no pixels
        image = torch.empty((h, w, 3), dtype=torch.uint8, device="meta").permute(2, 0, 1)
        image, _, _ = transform.apply(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), draw.batch_draw)
        return image.shape[1], image.shape[2]

    draws = iter(sampler)
    batches = np.array(
        [[transformed_size(next(draws)) for _ in range(batch_size)] for _ in range(num_batches)]
    )  # (batches, N, 2)
    rows = []
    for multiple in pad_to:
        padded = -(-batches.max(1) // multiple) * multiple  # (batches, 2)
        waste = 1 - batches.prod(2).sum() / (padded.prod(1) * batch_size).sum()
        num_shapes = len(np.unique(padded, axis=0))
        rows.append(PaddingRow(batch_size, sampling, multiple, float(waste), num_shapes, num_batches))
    return rows


def coco_like_sizes(num_images: int, seed: int = 0) -> NDArray[np.int64]:
    """(num_images, 2) the (h, w) of images drawn from `COCO_SIZES`."""
    sizes = np.array(list(COCO_SIZES), dtype=np.int64)
    counts = np.array(list(COCO_SIZES.values()), dtype=np.float64)
    return sizes[np.random.default_rng(seed).choice(len(sizes), num_images, p=counts / counts.sum())]
