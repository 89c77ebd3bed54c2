"""The entries of a COCO dict, each checked: sound ones become flat arrays, faulty ones are named and left out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from detr.coco_ids import whole_id
from detr.data.annotations import CocoAnnotations, PackedStrings
from detr.data.faults import Fault, listed


def parse_annotations(
    content: dict[str, Any], path: Path, *, need_annotations: bool = True
) -> tuple[CocoAnnotations, list[Fault]]:
    """The sound entries of a COCO dict, and what is wrong with the others.

    Beside COCO's keys an annotation may have `source`, where it stands (such as "labels/a.txt line 3"), which
    then names it in messages.

    Args:
        content: The dict. It is not changed.
        path: Where it comes from, for messages.
        need_annotations: Whether a dict without an `annotations` list is an error.

    Raises:
        ValueError: A list is missing or empty, or no category, no image, or none of the annotations is sound.
    """
    found = _Findings(path)
    categories = _records(content, "categories", path)
    images = _records(content, "images", path)
    annotations = _records(content, "annotations", path) if need_annotations or "annotations" in content else []
    if not categories:
        raise ValueError(f"{path} lists no categories, so there is nothing to detect. Add a 'categories' list")
    if not images:
        raise ValueError(f"{path} lists no images: the dataset is empty. Add an 'images' list")

    name_of_category = _categories(categories, found)
    rows_of_images = _images(images, found)
    index_of_category = {category_id: index for index, category_id in enumerate(sorted(name_of_category))}
    index_of_image = {image_id: index for index, image_id in enumerate(rows_of_images)}
    reader = _AnnotationReader(index_of_image, index_of_category, found)
    rows = [row for position, record in enumerate(annotations) if (row := reader.read(record, position)) is not None]
    for kind, given, sound in (
        ("categories", categories, name_of_category),
        ("images", images, rows_of_images),
        ("annotations", annotations, rows),
    ):
        if given and not sound:
            raise ValueError(
                f"{path} has {len(found.faults)} fault(s), and none of its {len(given)} {kind} can be used:\n  "
                f"{listed([fault.problem for fault in found.faults])}\nCorrect these entries"
            )

    table = np.array([row[1:] for row in rows], dtype=np.float64).reshape(-1, 8)  # image, category, crowd, area, box
    order = np.argsort(table[:, 0], kind="stable")
    table = table[order]
    category_ids = tuple(index_of_category)
    return CocoAnnotations(
        path=path,
        image_ids=np.array(list(rows_of_images), dtype=np.int64),
        file_names=PackedStrings(name for name, _ in rows_of_images.values()),
        image_sizes=np.array([size for _, size in rows_of_images.values()], dtype=np.int64),
        first_box=np.searchsorted(table[:, 0], np.arange(len(rows_of_images) + 1)).astype(np.int64),
        annotation_ids=np.array([row[0] for row in rows], dtype=np.int64)[order],
        boxes=np.ascontiguousarray(table[:, 4:]),
        areas=np.ascontiguousarray(table[:, 3]),
        crowd=table[:, 2] > 0,
        categories=table[:, 1].astype(np.int64),
        category_ids=category_ids,
        category_names=tuple(name_of_category[category_id] for category_id in category_ids),
    ), found.faults


class _Findings:
    """The faults of a file, in the order they are met."""

    def __init__(self, path: Path) -> None:
        self._file = str(path)
        self.faults: list[Fault] = []

    def add(
        self, kind: str, where: str, what: str, action: str, *, image_id: Any = None, annotation_id: Any = None
    ) -> None:
        self.faults.append(
            Fault(
                kind,
                "fault",
                self._file,
                f"{where}: {what}",
                action,
                image_id=image_id,
                annotation_id=annotation_id,
            )
        )


def _records(content: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    records = content.get(key)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        found = "nothing" if records is None else f"a {type(records).__name__}"
        raise ValueError(
            f"{path} needs a list of dicts named '{key}'; found {found} there (its keys: {sorted(content)}). "
            "Is it a COCO detection file?"
        )
    return records


def _categories(records: list[dict[str, Any]], found: _Findings) -> dict[int, str]:
    """The name of each sound category, by id."""
    names: dict[int, str] = {}
    for position, record in enumerate(records):
        category_id = whole_id(record.get("id"))
        action = "dropped, and its annotations with it"
        if not is_int(category_id):
            what = f"its id must be an integer; got {shortened(category_id)}"
            found.add("category_id", f"category at position {position}", what, action)
        elif category_id in names:
            what = "more than one has this id"
            found.add("category_id_twice", f"category {category_id}", what, "the first one stays")
        elif fault := _text_fault(record.get("name")):
            found.add("category_name", f"category {category_id}", f"'name' {fault}", action)
        else:
            names[category_id] = record["name"]
    return names


def _images(records: list[dict[str, Any]], found: _Findings) -> dict[int, tuple[str, tuple[int, int]]]:
    """The file name and the (h, w) of each sound image, by id; (-1, -1) where the file gives no size."""
    images: dict[int, tuple[str, tuple[int, int]]] = {}
    for position, record in enumerate(records):
        image_id = whole_id(record.get("id"))
        action = "dropped, and its annotations with it"
        if not is_int(image_id):
            what = f"its id must be an integer; got {shortened(image_id)}"
            found.add("image_id", f"image at position {position}", what, action, image_id=image_id)
        elif image_id in images:
            what = "more than one has this id"
            found.add("image_id_twice", f"image {image_id}", what, "the first one stays", image_id=image_id)
        elif fault := _text_fault(record.get("file_name")):
            found.add("file_name", f"image {image_id}", f"'file_name' {fault}", action, image_id=image_id)
        else:
            images[image_id] = (record["file_name"], _image_size(record, image_id, found))
    return images


def _image_size(record: dict[str, Any], image_id: int, found: _Findings) -> tuple[int, int]:
    """(h, w) of an image, (-1, -1) where the file does not say."""
    h, w = record.get("height"), record.get("width")
    if h is None and w is None:
        return (-1, -1)
    if not (_is_pixel_count(h) and _is_pixel_count(w)):
        what = f"height and width must be whole numbers of pixels; got {shortened(h)}, {shortened(w)}"
        action = "the size is read from the image"
        found.add("image_size", f"image {image_id}", what, action, image_id=image_id)
        return (-1, -1)
    return (int(h), int(w))


class _AnnotationReader:
    """Reads annotations one by one against the file's images and categories.

    Args:
        index_of_image: The index of each sound image, by id.
        index_of_category: The index of each sound category, by id, in ascending order.
        found: Takes the faults.
    """

    def __init__(self, index_of_image: dict[int, int], index_of_category: dict[int, int], found: _Findings) -> None:
        self._index_of_image = index_of_image
        self._index_of_category = index_of_category
        self._found = found
        self._seen: set[int] = set()
        self._known_categories = shortened(list(index_of_category))

    def read(self, record: dict[str, Any], position: int) -> tuple[int | float, ...] | None:
        """(id or -1, image index, category index, crowd, area, x, y, w, h), or None and a fault."""
        annotation_id = whole_id(record.get("id"))
        name = f"annotation {annotation_id}" if annotation_id is not None else f"annotation at position {position}"
        if "source" in record:
            name = record["source"]
        image_id = whole_id(record.get("image_id"))

        def fault(kind: str, what: str, action: str = "dropped", where: str = name) -> None:
            self._found.add(kind, where, what, action, image_id=image_id, annotation_id=annotation_id)

        if annotation_id is not None and not is_int(annotation_id):
            where = f"annotation at position {position}"
            fault("annotation_id", f"its id must be an integer; got {shortened(annotation_id)}", where=where)
            return None
        if annotation_id in self._seen:
            fault("annotation_id_twice", "more than one has this id", "the first one stays")
            return None
        if annotation_id is not None:
            self._seen.add(annotation_id)

        category_id = whole_id(record.get("category_id"))
        image = self._index(self._index_of_image, "image_id", image_id, lambda: "the file lists no such image", fault)
        category = self._index(
            self._index_of_category, "category_id", category_id, lambda: f"the categories are {self._known_categories}",
            fault,
        )  # fmt: skip
        crowd = record.get("iscrowd") or 0
        if crowd not in (0, 1):
            fault("iscrowd", f"iscrowd must be 0 or 1; got {shortened(crowd)}")
            return None
        box = record.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            fault("box", f"bbox must be four numbers [x, y, w, h]; got {shortened(box)}")
            return None
        if not all(map(math.isfinite, box)):
            fault("box_not_finite", f"bbox must be finite; got {shortened(box)}")
            return None
        area = record.get("area")
        if area is None:
            area = box[2] * box[3]
        elif not is_number(area) or not math.isfinite(area):
            fault("area", f"area must be a finite number; got {shortened(area)}", "its area becomes w * h")
            area = box[2] * box[3]
        if image is None or category is None:
            return None
        return (-1 if annotation_id is None else annotation_id, image, category, crowd, area, *box)

    @staticmethod
    def _index(
        index_of: dict[int, int],
        key: str,
        value: object,
        known: Callable[[], str],
        fault: Callable[[str, str], None],
    ) -> int | None:
        if not is_int(value):
            fault(key, f"{key} must be an integer; got {shortened(value)}")
            return None
        if value not in index_of:
            fault(f"{key}_unknown", f"{key} {value} is unknown; {known()}")
            return None
        return index_of[value]


def is_int(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer that fits 64 bits; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number that float64 holds; true and false are none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023)


def shortened(value: object) -> str:
    """How a value is written in a message."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _text_fault(value: object) -> str | None:
    """What keeps a value from being a usable text."""
    if not isinstance(value, str) or not value:
        return f"must be a text; got {shortened(value)}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"is not valid Unicode: {value!r}"
    return None


def _is_pixel_count(value: object) -> TypeGuard[int | float]:
    return is_number(value) and math.isfinite(value) and value >= 1 and value == int(value)
