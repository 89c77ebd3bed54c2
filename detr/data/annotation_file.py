"""Reading a COCO-format annotation file, and checking it once before anything trains on it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from detr.data.annotations import CocoAnnotations, PackedStrings

_NUM_FAULTS_LISTED = 10


def load_coco_annotations(path: str | Path, *, need_annotations: bool = True) -> CocoAnnotations:
    """Read and check a COCO-format annotation file.

    Category and image ids may be any integers in any order. Missing `iscrowd`, `area`, `width` and `height`,
    `info` and `licenses` are fine, and so is a byte order mark.

    Args:
        path: The JSON file.
        need_annotations: Whether a file without an `annotations` list is an error (files of test images have
            none).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not readable as COCO annotations. One message lists the first faults and how
            many there are: ids that are not integers or not unique, boxes that are not four finite numbers,
            categories or images that are not in the file's lists.
    """
    path = Path(path).expanduser()
    content = _read_json(path)
    faults: list[str] = []
    categories = _records(content, "categories", path)
    images = _records(content, "images", path)
    annotations = _records(content, "annotations", path) if need_annotations or "annotations" in content else []
    if not categories:
        raise ValueError(f"{path} lists no categories, so there is nothing to detect. Add a 'categories' list")
    if not images:
        raise ValueError(f"{path} lists no images: the dataset is empty. Add an 'images' list")

    category_ids = _ids(categories, "category", faults)
    names = [_string(record, "name", f"category {record.get('id')!r}", faults) for record in categories]
    image_ids = _ids(images, "image", faults)
    file_names = [_string(record, "file_name", f"image {record.get('id')!r}", faults) for record in images]
    sizes = [_image_size(record, faults) for record in images]
    annotation_ids = _ids(annotations, "annotation", faults, required=False)

    ascending = sorted(range(len(categories)), key=category_ids.__getitem__)
    index_of_category = {category_ids[position]: index for index, position in enumerate(ascending)}
    index_of_image = {image_id: index for index, image_id in enumerate(image_ids)}
    rows = [
        _annotation(record, position, index_of_image, index_of_category, faults)
        for position, record in enumerate(annotations)
    ]
    if faults:
        listed = "\n  ".join(faults[:_NUM_FAULTS_LISTED])
        more = len(faults) - _NUM_FAULTS_LISTED
        raise ValueError(
            f"{path} has {len(faults)} fault(s) that training or evaluation cannot go on with:\n  {listed}"
            + (f"\n  ... and {more} more" if more > 0 else "")
            + "\nCorrect or remove these entries"
        )

    table = np.array(rows, dtype=np.float64).reshape(-1, 8)  # image, category, crowd, area, x, y, w, h
    order = np.argsort(table[:, 0], kind="stable")
    table = table[order]
    return CocoAnnotations(
        path=path,
        image_ids=np.array(image_ids, dtype=np.int64),
        file_names=PackedStrings(file_names),
        image_sizes=np.array(sizes, dtype=np.int64),
        first_box=np.searchsorted(table[:, 0], np.arange(len(images) + 1)).astype(np.int64),
        annotation_ids=np.array(annotation_ids, dtype=np.int64)[order],
        boxes=np.ascontiguousarray(table[:, 4:]),
        areas=np.ascontiguousarray(table[:, 3]),
        crowd=table[:, 2] > 0,
        categories=table[:, 1].astype(np.int64),
        category_ids=tuple(category_ids[position] for position in ascending),
        category_names=tuple(names[position] for position in ascending),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no annotation file {path.absolute()}. Correct the path")
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Is the file complete?") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a COCO dict with 'images', 'annotations' and 'categories'; it holds a "
            f"{type(content).__name__}. (A list is the format of detections, not of annotations)"
        )
    return content


def _records(content: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    records = content.get(key)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        found = "nothing" if records is None else f"a {type(records).__name__}"
        raise ValueError(
            f"{path} needs a list of dicts named '{key}'; found {found} there (its keys: {sorted(content)}). "
            "Is it a COCO detection file?"
        )
    return records


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ids(records: list[dict[str, Any]], kind: str, faults: list[str], *, required: bool = True) -> list[int]:
    """The ids of `records`, which must be integers and differ. -1 stands for a faulty or absent one."""
    ids: list[int] = []
    seen: set[int] = set()
    for position, record in enumerate(records):
        value = record.get("id")
        if value is None and not required:
            ids.append(-1)
        elif not _is_int(value):
            faults.append(f"{kind} at position {position}: its id must be an integer; got {value!r}")
            ids.append(-1)
        elif value in seen:
            faults.append(f"{kind} {value}: more than one has this id")
            ids.append(value)
        else:
            seen.add(value)
            ids.append(value)
    return ids


def _string(record: dict[str, Any], key: str, where: str, faults: list[str]) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        faults.append(f"{where}: '{key}' must be a text; got {value!r}")
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:
        faults.append(f"{where}: '{key}' is not valid Unicode: {value!r}")
        return ""
    return value


def _image_size(record: dict[str, Any], faults: list[str]) -> tuple[int, int]:
    """(h, w) of an image, (-1, -1) where the file does not say."""
    h, w = record.get("height"), record.get("width")
    if h is None and w is None:
        return (-1, -1)
    if not (_is_pixel_count(h) and _is_pixel_count(w)):
        faults.append(f"image {record.get('id')!r}: height and width must be whole numbers of pixels; got {h!r}, {w!r}")
        return (-1, -1)
    return (int(h), int(w))


def _is_pixel_count(value: object) -> TypeGuard[int | float]:
    return _is_number(value) and math.isfinite(value) and value >= 1 and value == int(value)


def _annotation(
    record: dict[str, Any],
    position: int,
    index_of_image: dict[int, int],
    index_of_category: dict[int, int],
    faults: list[str],
) -> tuple[float, ...]:
    """(image index, category index, crowd, area, x, y, w, h); meaningless where it adds a fault."""
    name = f"annotation {record['id']!r}" if "id" in record else f"annotation at position {position}"

    image = _index(record, "image_id", index_of_image, lambda: "the file lists no such image", name, faults)
    category = _index(
        record,
        "category_id",
        index_of_category,
        lambda: f"the categories are {_shortened(sorted(index_of_category))}",
        name,
        faults,
    )
    crowd = record.get("iscrowd") or 0
    if crowd not in (0, 1):
        faults.append(f"{name}: iscrowd must be 0 or 1; got {crowd!r}")
        crowd = 0
    box = record.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        faults.append(f"{name}: bbox must be four numbers [x, y, w, h]; got {_shortened(box)}")
        return (image, category, crowd, 0, 0, 0, 0, 0)
    if not all(map(math.isfinite, box)):
        faults.append(f"{name}: bbox must be finite; got {box}")
        return (image, category, crowd, 0, 0, 0, 0, 0)
    area = record.get("area")
    if area is None:
        area = box[2] * box[3]
    elif not _is_number(area) or not math.isfinite(area):
        faults.append(f"{name}: area must be a finite number; got {area!r}")
        area = 0
    return (image, category, crowd, area, *box)


def _index(
    record: dict[str, Any],
    key: str,
    index_of: dict[int, int],
    known: Callable[[], str],
    name: str,
    faults: list[str],
) -> int:
    value = record.get(key)
    if not _is_int(value):
        faults.append(f"{name}: {key} must be an integer; got {value!r}")
        return 0
    if value not in index_of:
        faults.append(f"{name}: {key} {value} is unknown; {known()}")
        return 0
    return index_of[value]


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
