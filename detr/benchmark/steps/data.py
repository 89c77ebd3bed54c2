"""Where the batches of a measured step come from.

- `synthetic`: random pixels of one size, made before the clock starts. The step alone.
- `cached`: images of a dataset, decoded and augmented before the clock starts and held in memory; padding and
  collation are in the step. Real sizes and box counts, no decoding.
- `loader`: the DataLoader that trains, with its workers and augmentation.

The step's time includes the wait for its batch in all three.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from detr.benchmark.data.padding import coco_like_sizes
from detr.benchmark.data.speed import write_photos
from detr.data import DetectionData, Sample, collate
from detr.structures import Batch, ImageBatch, Target

DataSource = Literal["synthetic", "cached", "loader"]

# batches a worker of a DataLoader has ready
_PREFETCHED = 2
_NUM_CACHED_BATCHES = 8


@dataclass(frozen=True)
class StepBatches:
    """An endless supply of batches.

    Attributes:
        batches: The supply.
        num_ahead: Batches that may lie ready when the warm-up ends; taken first, so that they are not measured.
    """

    batches: Iterator[Batch]
    num_ahead: int = 0

    @classmethod
    def cycle(cls, batches: Sequence[Batch]) -> Self:
        """`batches`, again and again."""
        return cls(itertools.cycle(batches))


def check_source(source: str) -> DataSource:
    """`source`, if it is one.

    Raises:
        ValueError: It is not.
    """
    for known in get_args(DataSource):
        if source == known:
            return known
    raise ValueError(f"data_source is one of {', '.join(get_args(DataSource))}; got {source}")


def synthetic_batches(
    *, batch_size: int, height: int, width: int, targets_per_image: int, num_classes: int, num_batches: int = 4
) -> list[Batch]:
    """Random images of one size with random boxes, on the CPU; pinned where there is a GPU to send them to.

    Every image fills its batch but for its last 16 rows and 8 columns, in turn, so padding is not optimised away.

    Args:
        batch_size: Images a batch.
        height: Padded height in pixels.
        width: Padded width in pixels.
        targets_per_image: Boxes an image.
        num_classes: Labels are drawn from these.
        num_batches: Different batches, to be cycled through.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        images = [
            torch.randint(
                0,
                256,
                (3, height - 16 * (index % 2), width - 8 * (index % 3 // 2)),
                dtype=torch.uint8,
                generator=generator,
            )
            for index in range(batch_size)
        ]
        targets = tuple(
            Target(
                torch.randint(0, num_classes, (targets_per_image,), generator=generator),
                torch.rand(targets_per_image, 4, generator=generator) * 0.4 + 0.1,
                image_id=index,
                orig_size=(height, width),
            )
            for index in range(batch_size)
        )
        batches.append(_pinned(Batch(ImageBatch.from_images(images), targets)))
    return batches


def cached_batches(data: DetectionData, *, seed: int, rank: int = 0, world_size: int = 1) -> StepBatches:
    """Batches put together in the step, from images that were decoded and augmented before.

    Args:
        data: The training split, its batch size and padding; augmentation is that of a first epoch.
        seed: Of order and augmentation.
        rank: This rank.
        world_size: The number of ranks.

    Raises:
        ValueError: The dataset does not fill one batch of every rank.
    """
    loader = data.train_loader(seed=seed, rank=rank, world_size=world_size)
    cached = [_samples(batch) for batch in itertools.islice(loader, _NUM_CACHED_BATCHES)]

    def batches() -> Iterator[Batch]:
        for samples in itertools.cycle(cached):
            yield collate(samples, data.pad_to, allocate=_host_memory)

    return StepBatches(batches())


def loader_batches(
    data: DetectionData, *, num_batches: int, seed: int, pin_memory: bool, rank: int = 0, world_size: int = 1
) -> StepBatches:
    """The batches of the DataLoader that trains.

    A dataset with fewer than `num_batches` batches is repeated within the epoch, since an epoch's start, where no
    batch is ready, would weigh more than it does in training.

    Args:
        data: The training split and how it is loaded.
        num_batches: Batches that will be taken.
        seed: Of order and augmentation.
        pin_memory: Whether the memory of batches is page-locked.
        rank: This rank.
        world_size: The number of ranks.
    """
    num_ahead = data.num_workers * _PREFETCHED
    num_samples = (num_batches + num_ahead) * data.batch_size * world_size
    data.repeat_training(-(-num_samples // len(data.train_dataset())))
    loader = data.train_loader(seed=seed, rank=rank, world_size=world_size, pin_memory=pin_memory)

    def batches() -> Iterator[Batch]:
        while True:
            yield from loader

    return StepBatches(batches(), num_ahead)


def jpeg_sizes(size: str | Sequence[int], num_images: int) -> list[tuple[int, int]]:
    """(h, w) of each image: `size` is one for all, or `coco` for sizes drawn from those of COCO's photos.

    Raises:
        ValueError: It is neither.
    """
    if size == "coco":
        return [(int(h), int(w)) for h, w in coco_like_sizes(num_images)]
    if isinstance(size, str) or len(size) != 2:
        raise ValueError(f"jpeg_size must be [height,width] in pixels, or coco; got {size}")
    return [(int(size[0]), int(size[1]))] * num_images


def write_jpeg_dataset(folder: Path, sizes: Sequence[tuple[int, int]]) -> None:
    """Both splits of a dataset of `write_photos`: decoding as of COCO's photos without a download.

    Nothing is written where a dataset of the same numbers lies already.

    Args:
        folder: The root of the dataset.
        sizes: (h, w) of the training images in pixels; the validation split has one image, of the first size.

    Raises:
        ValueError: The folder holds something else.
    """
    marker = folder / "jpeg_dataset.json"
    wanted = {"sizes": [list(size) for size in sizes]}
    if marker.is_file() and json.loads(marker.read_text()) == wanted:
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds something else than {len(sizes)} JPEG images, the first of {sizes[0][0]} x {sizes[0][1]} "
            "pixels; remove it, or give another jpeg_folder"
        )
    write_photos(folder, sizes, split="train")
    write_photos(folder, sizes[:1], split="val")
    marker.write_text(json.dumps(wanted))


def _samples(batch: Batch) -> list[Sample]:
    """The images of a batch without their padding, each with its target."""
    return [
        (pixels[:, :h, :w].clone(), target)
        for pixels, (h, w), target in zip(batch.images.pixels, batch.images.sizes.tolist(), batch.targets, strict=True)
    ]


def _host_memory(num_bytes: int) -> Tensor:
    """uint8 memory, page-locked where there is a GPU to copy from it; PyTorch keeps it for later ones of the size."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _pinned(batch: Batch) -> Batch:
    return batch.pin_memory() if torch.cuda.is_available() else batch
