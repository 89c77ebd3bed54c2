"""The embedded synthetic dataset: coloured shapes on textured backgrounds, drawn on the fly.

Nothing is downloaded or stored. An image follows from (seed, split, index) alone, so all workers and ranks see
the same one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from detr.data.dataset import Sample, make_sample
from detr.data.layouts import Split
from detr.data.painting import paint_background, paint_object
from detr.data.placing import PlacedShape, Scene
from detr.data.shapes import SHAPES, draw_mask
from detr.data.transforms import DetectionTransform
from detr.structures import ClassTable

_EMPTY_SHARE = 0.08
_MIN_SIZE, _MAX_SIZE = 64, 1024
# a scene numbers its objects in 8 bits; thinner outlines than that have no pixel that is half covered
_MOST_OBJECTS = 200
_LEAST_SIDE_PX = 8


class SyntheticDataset(Dataset[Sample]):
    """Shapes that differ in outline, colour and pattern: several an image, overlapping, many of them small.

    Boxes fit the pixels of each shape as it was drawn; later shapes hide at most a third of it. Image ids are
    the index + 1, category ids the label + 1.

    Args:
        split: "train" or "val", which have no image in common.
        transforms: Augmentation or resizing.
        num_images: The length.
        size: Height and width of the images in pixels, 64 to 1024.
        num_classes: How many of the shapes to draw, at least 2.
        max_objects: The most objects an image; one in twelve images has none.
        min_side_px: Side of the smallest shapes in pixels, before their proportions vary.
        max_side_share: Side of the largest, relative to `size`.
        seed: Another seed gives other images.

    Attributes:
        class_table: The classes, by label.
    """

    def __init__(
        self,
        split: Split,
        transforms: DetectionTransform,
        *,
        num_images: int,
        size: int = 160,
        num_classes: int = 6,
        max_objects: int = 7,
        min_side_px: float = 18,
        max_side_share: float = 0.45,
        seed: int = 0,
    ) -> None:
        if split not in ("train", "val"):
            raise ValueError(f"split must be 'train' or 'val'; got {split!r}")
        if num_images < 1:
            raise ValueError(f"the synthetic {split} split needs at least one image; got {num_images}")
        if not _MIN_SIZE <= size <= _MAX_SIZE:
            raise ValueError(f"the size of synthetic images must be {_MIN_SIZE} to {_MAX_SIZE} pixels; got {size}")
        if not 2 <= num_classes <= len(SHAPES):
            raise ValueError(f"the synthetic dataset has 2 to {len(SHAPES)} classes; got {num_classes}")
        if not 1 <= max_objects <= _MOST_OBJECTS:
            raise ValueError(f"max_objects of synthetic images must be 1 to {_MOST_OBJECTS}; got {max_objects}")
        if not (_LEAST_SIDE_PX <= min_side_px <= max_side_share * size and max_side_share <= 1):
            raise ValueError(
                f"the sides of synthetic shapes must be {_LEAST_SIDE_PX} pixels to the whole image, smallest first; "
                f"got min_side_px={min_side_px} and max_side_share={max_side_share} of {size} pixels"
            )
        names = tuple(SHAPES)[:num_classes]
        self.class_table = ClassTable(names=names, category_ids=tuple(range(1, num_classes + 1)))
        self._split = split
        self._transforms = transforms
        self._num_images = num_images
        self._size = size
        self._max_objects = max_objects
        self._log_sides = (np.log(min_side_px), np.log(max_side_share * size))
        self._seed = seed

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> Sample:
        """Image `index` with its target."""
        return self.load(index, None)

    def load(self, index: int, batch_draw: float | None) -> Sample:
        """Image `index` with its target; `batch_draw` is what the images of a batch share."""
        pixels, boxes, labels = self.render(index)
        return make_sample(
            torch.from_numpy(pixels),
            boxes.astype(np.float32),
            labels,
            image_id=index + 1,
            transforms=self._transforms,
            batch_draw=batch_draw,
        )

    def original(self, file_name: str) -> Tensor:
        """(3, size, size) uint8 RGB: the image that the ground truth calls `file_name`."""
        pixels, _, _ = self.render(int(Path(file_name).stem) - 1)
        return torch.from_numpy(pixels)

    def aspects(self) -> NDArray[np.float64]:
        """(num_images,) width / height of every image: they are square."""
        return np.ones(len(self))

    def repeat_factors(self, threshold: float) -> NDArray[np.float64]:
        """(num_images,) ones: no class is rare, each object's is drawn from all."""
        return np.ones(len(self))

    def render(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Image `index` before any transform.

        Returns:
            (3, size, size) uint8 RGB; boxes (T, 4) as (x0, y0, x1, y1) in pixels, ends exclusive; labels (T,).
        """
        placing, painting = self._generators(index)
        objects = self._place_objects(placing)
        pixels = paint_background(painting, self._size)
        for item in objects:
            x0, y0, x1, y1 = item.box
            hue = item.label / self.class_table.num_classes
            paint_object(painting, pixels[:, y0:y1, x0:x1], item.mask, hue=hue, pattern=item.label)
        boxes = np.array([item.box for item in objects], dtype=np.int64).reshape(-1, 4)
        labels = np.array([item.label for item in objects], dtype=np.int64)
        return np.clip(pixels, 0, 255, out=pixels).astype(np.uint8), boxes, labels

    def coco_ground_truth(self) -> dict[str, Any]:
        """All boxes as a COCO dict, without painting a single image."""
        images = [
            {
                "id": index + 1,
                "file_name": f"{index + 1:06d}.png",
                "height": self._size,
                "width": self._size,
            }
            for index in range(len(self))
        ]
        categories = [
            {"id": category_id, "name": name}
            for category_id, name in zip(self.class_table.category_ids, self.class_table.names, strict=True)
        ]
        return {
            "info": {"description": f"synthetic shapes, {self._split} split, seed {self._seed}"},
            "licenses": [],
            "images": images,
            "categories": categories,
            "annotations": list(self._annotations()),
        }

    def write_coco(self, folder: str | Path) -> None:
        """Write the split as a COCO dataset: annotations/instances_<split>.json and <split>/*.png.

        Args:
            folder: The root of the dataset, made if it does not exist; the other split may be in it already.

        Raises:
            FileExistsError: The split is already there.
        """
        annotation_file = Path(folder) / "annotations" / f"instances_{self._split}.json"
        image_folder = Path(folder) / self._split
        for path in (annotation_file, image_folder):
            if path.exists():
                raise FileExistsError(f"{path} exists already. Remove it or choose another folder")
        image_folder.mkdir(parents=True)
        annotation_file.parent.mkdir(exist_ok=True)
        ground_truth = self.coco_ground_truth()
        for index, image in enumerate(ground_truth["images"]):
            pixels, _, _ = self.render(index)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(image_folder / image["file_name"])
        annotation_file.write_text(json.dumps(ground_truth))

    def _annotations(self) -> Iterator[dict[str, Any]]:
        annotation_id = 0
        for index in range(len(self)):
            placing, _ = self._generators(index)
            for item in self._place_objects(placing):
                annotation_id += 1
                x0, y0, x1, y1 = item.box
                yield {
                    "id": annotation_id,
                    "image_id": index + 1,
                    "category_id": self.class_table.category_ids[item.label],
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": 0,
                }

    def _generators(self, index: int) -> tuple[np.random.Generator, np.random.Generator]:
        """One for the places and one for the paint, so that the places can be had without the paint."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of the {len(self)} of the synthetic {self._split} split")
        sequence = np.random.SeedSequence(self._seed, spawn_key=(("train", "val").index(self._split), index))
        placing, painting = (np.random.Generator(np.random.PCG64(child)) for child in sequence.spawn(2))
        return placing, painting

    def _place_objects(self, random: np.random.Generator) -> list[PlacedShape]:
        """The objects of an image, first to last drawn."""
        if random.random() < _EMPTY_SHARE:
            return []
        shapes = list(SHAPES.values())
        scene = Scene(self._size)
        for _ in range(int(random.integers(1, self._max_objects + 1))):
            label = int(random.integers(self.class_table.num_classes))
            log_side = random.uniform(*self._log_sides)
            mask = draw_mask(
                shapes[label],
                side_px=float(np.exp(log_side)),
                aspect=float(np.exp(random.uniform(-0.25, 0.25))),
                angle=float(random.uniform(-0.3, 0.3)),
            )
            scene.place(random, label, mask)
        return scene.shapes
