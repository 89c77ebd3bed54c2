"""How much memory the data workers hold over several epochs of a large annotation file."""

import json
import multiprocessing
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from detr.data import CocoDataset, DetectionDataset, EvalTransform, build_train_loader


@dataclass(frozen=True)
class MemoryUse:
    """Proportional set size of the workers, all together, in MiB.

    Pages that processes share count in parts, so that the sum is what the machine has to have.

    Attributes:
        warm_mib: After the first tenth of the first epoch, when every worker has served.
        epoch_ends_mib: At the end of each epoch.
    """

    warm_mib: float
    epoch_ends_mib: tuple[float, ...]

    @property
    def growth(self) -> float:
        """The largest change from the end of the first epoch on, as a share of it."""
        first = self.epoch_ends_mib[0]
        return max(abs(value / first - 1) for value in (*self.epoch_ends_mib, self.warm_mib))


def write_many_annotations(folder: Path, *, num_annotations: int, boxes_an_image: int = 10) -> tuple[Path, Path]:
    """A COCO file of many boxes whose images are all one small file.

    Args:
        folder: Where to.
        num_annotations: How many boxes.
        boxes_an_image: Of each image.

    Returns:
        The annotation file and the image folder.
    """
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    side_px = 32
    pixels = np.random.default_rng(0).integers(0, 256, (side_px, side_px, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(images / "one.jpg")
    num_images = num_annotations // boxes_an_image
    content = {
        "images": [
            {"id": index, "file_name": "one.jpg", "width": side_px, "height": side_px} for index in range(num_images)
        ],
        "categories": [{"id": number, "name": f"class {number}"} for number in range(80)],
        "annotations": [
            {
                "id": index + 1,
                "image_id": index // boxes_an_image,
                "category_id": index % 80,
                "bbox": [index % 7, index % 11, 8, 8],
                "area": 64,
                "iscrowd": 0,
            }
            for index in range(num_images * boxes_an_image)
        ],
    }
    annotations = folder / "many.json"
    annotations.write_text(json.dumps(content))
    return annotations, images


def measure_memory(dataset: DetectionDataset, *, num_workers: int, num_epochs: int = 2) -> MemoryUse:
    """Iterate over a dataset with worker processes and add up what they hold.

    Args:
        dataset: What they load.
        num_workers: How many.
        num_epochs: Over how many epochs, with the same workers.

    Raises:
        OSError: The system is no Linux.
    """
    loader = build_train_loader(dataset, batch_size=8, num_workers=num_workers, pad_to=1, seed=0)
    before = {child.pid for child in multiprocessing.active_children()}
    warm_mib = 0.0
    ends = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for number, _ in enumerate(loader, 1):
            if epoch == 0 and number == len(loader) // 10:
                warm_mib = _workers_mib(before)
        ends.append(_workers_mib(before))
    return MemoryUse(warm_mib, tuple(ends))


def many_annotations_dataset(folder: Path, num_annotations: int) -> CocoDataset:
    """The dataset of `write_many_annotations`."""
    annotations, images = write_many_annotations(folder, num_annotations=num_annotations)
    return CocoDataset(annotations, images, EvalTransform(None, None), training=True)


def proportional_set_size_mib(pid: int) -> float:
    """What a process holds in MiB, shared pages counted in parts."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/{pid}/smaps_rollup gives no Pss")
    return int(match[1]) / 1024


def _workers_mib(others: set[int | None]) -> float:
    pids = [child.pid for child in multiprocessing.active_children() if child.pid not in others]
    return sum(proportional_set_size_mib(pid) for pid in pids if pid is not None and pid != os.getpid())
