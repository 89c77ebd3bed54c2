"""How fast images come out of the data pipeline: on one core against Pillow's, and from workers."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from detr.benchmark.data.baseline import PillowPipeline, pad_floats
from detr.data import CocoDataset, build_train_loader, collate, detr_augmentation
from detr.data.layouts import Split
from detr.data.repeated import RepeatedDataset

SIZES, MAX_SIZE = tuple(range(480, 801, 32)), 1333
# about the 0.54 bytes a pixel of 640 x 480 photos in COCO; what a JPEG costs to decode follows its bytes
_JPEG_QUALITY = 95
_BOXES_AN_IMAGE = 7


@dataclass(frozen=True)
class CoreSpeed:
    """Images a second of one core, the median over rounds in which the pipelines took turns.

    Attributes:
        ours: JPEG to a padded uint8 batch.
        baseline: JPEG to a padded, normalised float batch, by Pillow, ToTensor and Normalize.
        ratio: ours / baseline, the median of the rounds' ratios.
        ratio_range: The least and the largest of them.
    """

    ours: float
    baseline: float
    ratio: float
    ratio_range: tuple[float, float]


@dataclass(frozen=True)
class LoaderSpeed:
    """What a loader gives, and what it takes.

    Attributes:
        images_per_s: Of wall time.
        main_ms: CPU time of the main thread a batch.
        worker_ms: CPU time of the worker a batch; None without workers.
    """

    images_per_s: float
    main_ms: float
    worker_ms: float | None


def write_photos(folder: Path, sizes: Sequence[tuple[int, int]], *, split: Split = "train", seed: int = 0) -> Path:
    """JPEGs as large in bytes as COCO's photos, with boxes, as a COCO dataset; what is there already is kept.

    Args:
        folder: Gets annotations/instances_SPLIT.json and SPLIT/.
        sizes: (h, w) of each image in pixels, of 96 and more.
        split: Of the dataset.
        seed: Of pixels and boxes.

    Returns:
        The annotation file.
    """
    annotations = folder / "annotations" / f"instances_{split}.json"
    images = folder / split
    images.mkdir(parents=True, exist_ok=True)
    annotations.parent.mkdir(exist_ok=True)
    records: list[dict[str, object]] = []
    boxes: list[dict[str, object]] = []
    for index, (h, w) in enumerate(sizes):
        random = np.random.default_rng((seed, index))
        name = f"{index:06d}.jpg"
        if not (images / name).exists():
            Image.fromarray(_photo(random, (h, w))).save(images / name, quality=_JPEG_QUALITY)
        records.append({"id": index + 1, "file_name": name, "height": h, "width": w})
        for _ in range(_BOXES_AN_IMAGE):
            x, y = random.uniform(0, w - 80), random.uniform(0, h - 80)
            box = [x, y, *random.uniform(10, 80, 2)]
            boxes.append({"id": len(boxes) + 1, "image_id": index + 1, "category_id": 1, "bbox": box, "iscrowd": 0})
    content = {"images": records, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    annotations.write_text(json.dumps(content))
    return annotations


def measure_core(dataset: CocoDataset, *, num_rounds: int = 5, batch_size: int = 2) -> CoreSpeed:
    """Time both pipelines on one core of this process, by its CPU time, taking turns.

    Args:
        dataset: Under `recipe()`.
        num_rounds: How often each takes all of the images.
        batch_size: Images a batch.
    """
    pillow = PillowPipeline(SIZES, MAX_SIZE)
    paths = [dataset.image_path(index) for index in range(len(dataset))]

    def ours(indices: Sequence[int]) -> object:
        return collate([dataset[index] for index in indices], pad_to=1)

    def baseline(indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return pad_floats([pillow(paths[index]) for index in indices])

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = np.array(
            [
                [_seconds_an_image(pipeline, len(dataset), batch_size, seed=number) for pipeline in (ours, baseline)]
                for number in range(num_rounds + 1)
            ][1:]  # the first round warms up
        )
    finally:
        torch.set_num_threads(num_threads)
    ratios = seconds[:, 1] / seconds[:, 0]
    ours_s, baseline_s = np.median(seconds, 0).tolist()
    return CoreSpeed(1 / ours_s, 1 / baseline_s, float(np.median(ratios)), (float(ratios.min()), float(ratios.max())))


def measure_loader(
    dataset: CocoDataset, *, num_workers: int, batch_size: int, pin_memory: bool, num_images: int
) -> LoaderSpeed:
    """Time a training loader over an epoch after its first batches.

    Args:
        dataset: Under `recipe()`.
        num_workers: Worker processes.
        batch_size: Images a batch.
        pin_memory: Whether batches end in page-locked memory.
        num_images: Images of an epoch; the dataset is repeated up to it.

    Raises:
        OSError: The system is no Linux.
    """
    others = {child.pid for child in multiprocessing.active_children()}
    repeated = RepeatedDataset(dataset, -(-num_images // len(dataset)))
    loader = build_train_loader(
        repeated, batch_size=batch_size, num_workers=num_workers, pad_to=1, seed=0, pin_memory=pin_memory
    )
    # workers start one after the other, and have batches ready before they are asked
    num_warmup = min(3 * max(1, num_workers), len(loader) // 2)
    start = np.zeros(3)
    for number, _ in enumerate(loader, 1):
        if number == num_warmup:
            start = _clocks_s(others)
    wall_s, main_s, workers_s = (_clocks_s(others) - start).tolist()
    num_batches = len(loader) - num_warmup
    return LoaderSpeed(
        images_per_s=num_batches * batch_size / wall_s,
        main_ms=1e3 * main_s / num_batches,
        worker_ms=1e3 * workers_s / num_batches if num_workers else None,
    )


def recipe_dataset(annotations: Path) -> CocoDataset:
    """The photos of `write_photos` under the augmentation of DETR."""
    images = annotations.parents[1] / "train"
    return CocoDataset(annotations, images, detr_augmentation(SIZES, MAX_SIZE), training=True)


def _clocks_s(others: set[int | None]) -> NDArray[np.float64]:
    """Wall time, CPU time of this thread, and CPU time of the child processes that are not among `others`."""
    ticks = 0
    for child in multiprocessing.active_children():
        if child.pid not in others:
            # behind the name in brackets; user and system time are fields 14 and 15
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return np.array([time.perf_counter(), time.thread_time(), ticks / os.sysconf("SC_CLK_TCK")])


def _seconds_an_image(
    pipeline: Callable[[Sequence[int]], object], num_images: int, batch_size: int, seed: int
) -> float:
    torch.manual_seed(seed)
    start_s = time.process_time()
    for first in range(0, num_images, batch_size):
        pipeline(range(first, min(first + batch_size, num_images)))
    return (time.process_time() - start_s) / num_images


def _photo(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """(h, w, 3) uint8 with detail at every scale, like a photo: noise of many sizes, the larger the stronger."""
    h, w = size
    pixels = np.full((h, w, 3), 128, dtype=np.float32)
    for cell_px, contrast in ((128, 50), (32, 25), (8, 14), (2, 9), (1, 4)):
        cells = random.normal(0, contrast, (h // cell_px + 2, w // cell_px + 2, 3)).astype(np.float32)
        grown = Image.fromarray(np.clip(cells + 128, 0, 255).astype(np.uint8)).resize(
            ((w // cell_px + 2) * cell_px, (h // cell_px + 2) * cell_px), Image.Resampling.BICUBIC
        )
        pixels += np.asarray(grown, dtype=np.float32)[:h, :w] - 128
    return np.clip(pixels, 0, 255).astype(np.uint8)
