"""COCO annotations as flat arrays.

Flat numpy arrays instead of lists of dicts: a data worker that touches a Python object writes its reference
count and so copies the page, which makes the memory of forked workers grow until it runs out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detr.structures import ClassTable

LabelMap = Literal["contiguous", "category_id"]

# a head of more rows than this because of one large category id is a mistake, not a wish
_MAX_CATEGORY_ID_ROWS = 10_000


@dataclass(frozen=True)
class CocoAnnotations:
    """What an annotation file says, images in file order and boxes grouped by image.

    Attributes:
        path: The file.
        image_ids: (I,) int64.
        file_names: (I,) the file names, packed.
        image_sizes: (I, 2) int64 (h, w) in pixels; (-1, -1) where the file gives none.
        first_box: (I + 1,) int64: the boxes of image i are rows first_box[i] to first_box[i + 1].
        annotation_ids: (A,) int64, as in the file; -1 where the file gives none.
        boxes: (A, 4) float64 (x, y, w, h) in pixels, exactly as in the file.
        areas: (A,) float64, w * h where the file gives none.
        crowd: (A,) bool.
        categories: (A,) int64, index into `category_ids`.
        category_ids: The ids of the file's categories, ascending.
        category_names: Their names.
    """

    path: Path
    image_ids: NDArray[np.int64]
    file_names: "PackedStrings"
    image_sizes: NDArray[np.int64]
    first_box: NDArray[np.int64]
    annotation_ids: NDArray[np.int64]
    boxes: NDArray[np.float64]
    areas: NDArray[np.float64]
    crowd: NDArray[np.bool_]
    categories: NDArray[np.int64]
    category_ids: tuple[int, ...]
    category_names: tuple[str, ...]

    def select(self, images: NDArray[np.bool_]) -> "CocoAnnotations":
        """These annotations with some of the images only.

        Args:
            images: (I,) which ones.
        """
        num_boxes = np.diff(self.first_box)
        boxes = np.repeat(images, num_boxes)
        return replace(
            self,
            image_ids=self.image_ids[images],
            file_names=PackedStrings(self.file_names[int(index)] for index in np.flatnonzero(images)),
            image_sizes=self.image_sizes[images],
            first_box=np.concatenate(([0], np.cumsum(num_boxes[images]))).astype(np.int64),
            annotation_ids=self.annotation_ids[boxes],
            boxes=self.boxes[boxes],
            areas=self.areas[boxes],
            crowd=self.crowd[boxes],
            categories=self.categories[boxes],
        )

    def class_table(self, label_map: LabelMap) -> ClassTable:
        """The labels of this file.

        Args:
            label_map: "contiguous": one label a category, by ascending category id. "category_id": the label
                is the category id itself, with a row for every id from 0 to the largest (91 rows for COCO),
                named "" where there is no category.
        """
        if label_map == "contiguous":
            return ClassTable(names=self.category_names, category_ids=self.category_ids)
        if label_map != "category_id":
            raise ValueError(f"label_map must be 'contiguous' or 'category_id'; got {label_map!r}")
        smallest, largest = self.category_ids[0], self.category_ids[-1]
        if smallest < 0 or largest >= _MAX_CATEGORY_ID_ROWS:
            raise ValueError(
                f"label_map='category_id' needs category ids from 0 to {_MAX_CATEGORY_ID_ROWS - 1}; those of "
                f"{self.path} go from {smallest} to {largest}. Use label_map='contiguous'"
            )
        names = dict(zip(self.category_ids, self.category_names, strict=True))
        rows = range(largest + 1)
        return ClassTable(names=tuple(names.get(row, "") for row in rows), category_ids=tuple(rows))

    def ground_truth(self) -> dict[str, Any]:
        """The file as a COCO dict for the evaluator: boxes as they stand in the file, crowds included.

        `info`, `licenses`, `iscrowd` and `area` are filled in, and annotations are numbered from 1, because
        pycocotools takes the id 0 for "unmatched". Boxes without area stay in: dropping them would give an
        AP that other tools do not.
        """
        image_of_box = np.repeat(np.arange(len(self.image_ids)), np.diff(self.first_box))
        return {
            "info": {},
            "licenses": [],
            "images": [
                {"id": image_id, "file_name": self.file_names[index]} | ({"height": h, "width": w} if h > 0 else {})
                for index, (image_id, (h, w)) in enumerate(
                    zip(self.image_ids.tolist(), self.image_sizes.tolist(), strict=True)
                )
            ],
            "categories": [
                {"id": category_id, "name": name}
                for category_id, name in zip(self.category_ids, self.category_names, strict=True)
            ],
            "annotations": [
                {
                    "id": row + 1,
                    "image_id": image_id,
                    "category_id": self.category_ids[category],
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for row, (image_id, category, box, area, crowd) in enumerate(
                    zip(
                        self.image_ids[image_of_box].tolist(),
                        self.categories.tolist(),
                        self.boxes.tolist(),
                        self.areas.tolist(),
                        self.crowd.tolist(),
                        strict=True,
                    )
                )
            ],
        }


class PackedStrings:
    """Strings in one byte array: two Python objects however many there are."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode() for string in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._bytes[self._ends[index] : self._ends[index + 1]].tobytes().decode()
