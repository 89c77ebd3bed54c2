"""COCO files for evaluation: ground truth checked and re-indexed, detections checked, read and written.

What the COCO tools load without a word, or crash on, is settled here once for every backend: annotation ids
from 0 (their mark for "unmatched"), missing `info`, `area` and `iscrowd`, string image ids, faulty boxes.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor
from torchvision.ops import box_convert

from detr.coco_ids import whole_id
from detr.structures import ClassTable, Detections

ImageId = int | str


class CocoResult(TypedDict):
    """One detection in COCO's result files; `bbox` is (x, y, w, h) in pixels of the original image."""

    image_id: ImageId
    category_id: int
    bbox: list[float]
    score: float


@dataclass(frozen=True)
class GroundTruth:
    """An annotation file as the evaluation backends need it. Build it with :func:`prepare_ground_truth`.

    Attributes:
        image_numbers: Image id as a string -> number from 1, in the order of the ids.
        categories: Category id -> name, in the order of the ids.
        annotations: COCO annotations with `id` from 1, `image_id` an image number, `category_id`, `bbox`
            (x, y, w, h) in pixels, `area` and `iscrowd`.
    """

    image_numbers: Mapping[str, int]
    categories: Mapping[int, str]
    annotations: Sequence[Mapping[str, Any]]

    def dataset(self) -> dict[str, Any]:
        """A fresh COCO dictionary; the backends write into theirs."""
        return {
            "info": {},
            "licenses": [],
            "images": [{"id": number} for number in self.image_numbers.values()],
            "categories": [{"id": id, "name": name} for id, name in self.categories.items()],
            "annotations": [dict(annotation) for annotation in self.annotations],
        }

    def image_number(self, image_id: ImageId) -> int:
        """The number of an image.

        Raises:
            ValueError: The id is not in the annotation file.
        """
        number = self.image_numbers.get(str(whole_id(image_id)))
        if number is None:
            raise ValueError(
                f"image id {image_id!r} is not among the {len(self.image_numbers)} images of the annotation "
                f"file (first ids: {', '.join(list(self.image_numbers)[:5])}). Evaluate on the annotation "
                "file that the images came from"
            )
        return number


def prepare_ground_truth(dataset: Mapping[str, Any], source: str = "the annotation file") -> GroundTruth:
    """Check a COCO dictionary and bring it into the form every backend scores alike; it is left as it is.

    Annotation ids are replaced by 1, 2, ..., since the COCO tools read a match with id 0 as none. Image ids
    are compared as strings, so 7, 7.0 and "7" are the same image. A missing `area` is w * h, a missing `iscrowd`
    0. Boxes without area stay, as they do in pycocotools: they count as objects that nothing can find.

    Args:
        dataset: A parsed annotation file with `images`, `annotations` and `categories`.
        source: What errors call it.

    Raises:
        ValueError: No images or categories, an entry that is not an object, an id twice, an annotation of an
            unknown image or category, or a box, area or crowd flag that is not what it must be.
    """
    for key in ("images", "annotations", "categories"):
        if not isinstance(dataset.get(key), list):
            raise ValueError(
                f"{source} needs a list `{key}`; found {type(dataset.get(key)).__name__} "
                f"(keys: {', '.join(map(str, dataset))}). Give a file in COCO's annotation format"
            )
        for number, entry in enumerate(dataset[key], start=1):
            if not isinstance(entry, Mapping):
                raise ValueError(
                    f"{source}: entry {number} of `{key}` must be an object with its keys; found {entry!r}. Give a "
                    "file in COCO's annotation format"
                )
    if not dataset["images"]:
        raise ValueError(f"{source} lists no images, so there is nothing to evaluate; check its path")
    image_numbers = _number_images(dataset["images"], source)
    categories = _category_names(dataset["categories"], source)
    annotations = []
    for number, annotation in enumerate(dataset["annotations"], start=1):
        where = f"{source}: annotation {annotation.get('id', f'number {number}')}"
        bbox = _checked_bbox(annotation.get("bbox"), where)
        category_id = _checked_category(annotation.get("category_id"), categories, where)
        image_id = whole_id(annotation.get("image_id"))
        if str(image_id) not in image_numbers:
            raise ValueError(
                f"{where}: image_id {image_id!r} is not in `images` ({len(image_numbers)} ids); list the image, or "
                "remove the annotation"
            )
        annotations.append(
            {
                "id": number,
                "image_id": image_numbers[str(image_id)],
                "category_id": category_id,
                "bbox": bbox,
                "area": _checked_area(annotation.get("area"), bbox, where),
                "iscrowd": _checked_crowd(annotation.get("iscrowd"), where),
            }
        )
    return GroundTruth(image_numbers, categories, annotations)


def number_results(
    results: Sequence[CocoResult], ground_truth: GroundTruth, source: str = "the detections"
) -> list[dict[str, Any]]:
    """Check detections against the ground truth and bring them into the backends' form.

    Args:
        results: In COCO's result format.
        ground_truth: What they are checked against.
        source: What errors call the results.

    Raises:
        ValueError: An unknown image or category, a box that is not four finite numbers, or a score that is
            not a finite number; names the entry.
    """
    numbered = []
    for number, result in enumerate(results, start=1):
        where = f"{source}: detection {number} of {len(results)}"
        for key in ("image_id", "category_id", "bbox", "score"):
            if key not in result:
                raise ValueError(
                    f"{where}: `{key}` is missing; found the keys {', '.join(map(str, result))}. Write the file in "
                    "COCO's result format"
                )
        bbox = _checked_bbox(result["bbox"], where)
        score = result["score"]
        if not _is_finite_number(score):
            raise ValueError(
                f"{where}: score must be a finite number; found {score!r}. Correct it, or remove the detection"
            )
        try:
            image_number = ground_truth.image_number(result["image_id"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        numbered.append(
            {
                "id": number,
                "image_id": image_number,
                "category_id": _checked_category(result["category_id"], ground_truth.categories, where),
                "bbox": bbox,
                "area": bbox[2] * bbox[3],
                "iscrowd": 0,
                "score": float(score),
            }
        )
    return numbered


def to_results(image_id: ImageId, detections: Detections, class_table: ClassTable) -> list[CocoResult]:
    """The detections of one image in COCO's result format, with the category ids of the annotation file."""
    boxes_xywh: Tensor = box_convert(detections.boxes.double(), "xyxy", "xywh")  # (T, 4)
    return [
        CocoResult(image_id=image_id, category_id=class_table.category_ids[label], bbox=bbox, score=score)
        for label, bbox, score in zip(
            detections.labels.tolist(), boxes_xywh.tolist(), detections.scores.tolist(), strict=True
        )
    ]


def write_results(path: Path, results: Sequence[CocoResult]) -> None:
    """Write a COCO result file; a reader never sees half of one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(list(results), allow_nan=False), encoding="utf-8")
    os.replace(partial, path)


def read_annotations(path: Path) -> dict[str, Any]:
    """Parse a COCO annotation file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON in UTF-8, or not an object.
    """
    dataset = _read_json(path, "annotation file")
    if not isinstance(dataset, dict):
        raise ValueError(
            f"annotation file {path} must hold a JSON object with images, annotations and categories; found "
            f"a {type(dataset).__name__}. A list is a detection file"
        )
    return dataset


def read_results(path: Path) -> list[CocoResult]:
    """Parse a COCO result file; its entries are checked by :func:`number_results`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not JSON in UTF-8, or not a list of objects.
    """
    results = _read_json(path, "detection file")
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise ValueError(
            f"detection file {path} must hold a JSON list of objects with image_id, category_id, bbox and "
            f"score; found a {type(results).__name__}. An object with images and annotations is an "
            "annotation file"
        )
    return results


def _read_json(path: Path, what: str) -> Any:
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder; give the {what} itself")
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path} (looked in {path.absolute().parent}); check the path")
    try:
        # as in training, a byte order mark may come first
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} {path} is not valid JSON: {error}. Was it cut while copying?") from error


def _number_images(images: Sequence[Mapping[str, Any]], source: str) -> dict[str, int]:
    ids = [whole_id(image.get("id")) for image in images]
    wrong = [id for id in ids if isinstance(id, bool) or not isinstance(id, int | str)]
    if wrong:
        raise ValueError(
            f"{source}: image ids must be integers or strings; found {wrong[0]!r} ({len(wrong)} such). Correct the "
            "`id` of those images and the `image_id` of their annotations"
        )
    # the order of ids decides between equal scores, so integers go by value as they do in pycocotools
    ordered = sorted(ids, key=lambda id: (isinstance(id, str), id))
    numbers = {str(id): number for number, id in enumerate(ordered, start=1)}
    if len(numbers) != len(ids):
        raise ValueError(
            f"{source}: image ids must differ (7 and '7' are equal); found {len(ids)} images with {len(numbers)} "
            "ids. Give each image its own `id`"
        )
    return numbers


def _category_names(categories: Sequence[Mapping[str, Any]], source: str) -> dict[int, str]:
    if not categories:
        raise ValueError(f"{source} lists no categories, so no detection can have a class; add them")
    names: dict[int, str] = {}
    for category in categories:
        id = whole_id(category.get("id"))
        if isinstance(id, bool) or not isinstance(id, int):
            raise ValueError(
                f"{source}: category ids must be integers; found {id!r}. Correct the `id` of the category and the "
                "`category_id` of its annotations"
            )
        if id in names:
            raise ValueError(
                f"{source}: category id {id} is listed twice: {names[id]!r} and {category.get('name')!r}. Give each "
                "category its own `id`"
            )
        names[id] = str(category.get("name", id))
    return dict(sorted(names.items()))


def _checked_category(category_id: Any, categories: Mapping[int, str], where: str) -> int:
    category_id = whole_id(category_id)
    if isinstance(category_id, bool) or not isinstance(category_id, int) or category_id not in categories:
        raise ValueError(
            f"{where}: category_id {category_id!r} is not in `categories` of the annotation file "
            f"(ids {', '.join(map(str, list(categories)[:10]))}{', ...' if len(categories) > 10 else ''}); "
            "correct it, or evaluate on the annotation file that has this category"
        )
    return category_id


def _checked_bbox(bbox: Any, where: str) -> list[float]:
    if not isinstance(bbox, list | tuple) or len(bbox) != 4 or not all(map(_is_finite_number, bbox)):
        raise ValueError(
            f"{where}: bbox must be four finite numbers (x, y, w, h) in pixels; found {bbox!r}. Correct or remove it"
        )
    return [float(side) for side in bbox]


def _checked_area(area: Any, bbox: list[float], where: str) -> float:
    if area is None:
        return bbox[2] * bbox[3]
    if not _is_finite_number(area):
        raise ValueError(
            f"{where}: area must be a finite number of pixels; found {area!r}. Correct it, or leave it out for w * h"
        )
    return float(area)


def _checked_crowd(crowd: Any, where: str) -> int:
    if crowd is None:
        return 0
    if crowd not in (0, 1):
        raise ValueError(f"{where}: iscrowd must be 0 or 1; found {crowd!r}. Correct it, or leave it out for 0")
    return int(crowd)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
