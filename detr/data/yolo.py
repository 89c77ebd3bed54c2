"""YOLO text labels as a COCO dict: one line a box, `class cx cy w h`, in shares of the image."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from detr.data.faults import Fault
from detr.data.images import IMAGE_SUFFIXES, read_image_size

NAMES_FILES = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml", "classes.txt", "obj.names", "names.txt")


def read_class_names(path: Path) -> list[str]:
    """The class names of a YOLO dataset by class number, from a YAML file with `names` or a line each.

    Raises:
        ValueError: The file lists no names, or not all numbers from 0 on have one.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix not in (".yaml", ".yml"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML ({error})") from error
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise ValueError(f"{path}: 'names' must have the class numbers 0 to {len(names) - 1}; got {list(names)}")
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise ValueError(f"{path} needs a list 'names' of class names; got {names!r}")
    return [str(name) for name in names]


def read_yolo(
    names: Sequence[str], images: Path, labels: Path, *, apply_exif: bool, listing: Path | None = None
) -> tuple[dict[str, Any], list[Fault]]:
    """Images and boxes of a split as a COCO dict, and the label files that belong to no image.

    An image without a label file has no objects. Polygons (`class x1 y1 x2 y2 x3 y3 ...`) become the boxes
    around them. Category ids are the class numbers; images are numbered from 1 by name.

    Args:
        names: The class names.
        images: The folder of images, subfolders included.
        labels: The folder of text files with the same names; may be the same folder.
        apply_exif: Whether the boxes are in shares of the image turned as its EXIF orientation says.
        listing: A text file that names the images of the split, one a line; their label files then lie beside them,
            or in `labels` instead of `images` where a folder of that name is above them. None: all in `images`.

    Raises:
        ValueError: The listing names no image.
    """
    if listing is None:
        files = sorted(path for path in images.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    else:
        files = _listed_files(listing, images)
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    with_image = set()
    for image_id, file in enumerate(files, 1):
        relative = file.relative_to(images)
        label_file = (labels / (relative if listing is None else _label_of_listed(relative))).with_suffix(".txt")
        with_image.add(label_file)
        record: dict[str, Any] = {"id": image_id, "file_name": relative.as_posix()}
        h = w = 0
        try:
            h, w = read_image_size(file, apply_exif=apply_exif)
            record |= {"height": h, "width": w}
        except (ValueError, FileNotFoundError):
            pass  # the dataset names the unreadable image, and then no box of it counts
        records.append(record)
        if label_file.is_file():
            for row in _label_rows(label_file, h=h, w=w):
                annotations.append({"id": len(annotations) + 1, "image_id": image_id, **row})
    faults = [
        Fault("label_without_image", "fault", str(file), "there is no image of this name", "dropped")
        for file in sorted(labels.rglob("*.txt") if listing is None else ())
        if file not in with_image and file.name not in (*NAMES_FILES, "train.txt", "val.txt", "test.txt")
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    return {"info": {}, "licenses": [], "images": records, "categories": categories, "annotations": annotations}, faults


def _listed_files(listing: Path, root: Path) -> list[Path]:
    """The images that a text file lists, below `root`; those that are missing keep their place.

    Lists are written for the folder that the training was started in, so what leads to `root` is left out.
    """
    files = []
    for line in listing.read_text(encoding="utf-8-sig").splitlines():
        named = Path(line.strip())
        parts = [part for part in named.parts if part not in ("..", ".", named.anchor)]
        if parts:
            tails = [root.joinpath(*parts[start:]) for start in range(len(parts))]
            files.append(next((path for path in tails if path.is_file()), tails[0]))
    if not files:
        raise ValueError(f"{listing} lists no images; write the path of an image in each line")
    return list(dict.fromkeys(files))


def _label_of_listed(image: Path) -> Path:
    """Where the label file of a listed image is, but for its suffix."""
    parts = list(image.parts)
    if "images" not in parts[:-1]:
        return image
    parts[len(parts) - 2 - parts[-2::-1].index("images")] = "labels"
    return Path(*parts)


def _label_rows(file: Path, *, h: int, w: int) -> list[dict[str, Any]]:
    """The boxes of a label file as COCO annotations; what is no box goes on as it is, to be named as faulty."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        row: dict[str, Any] = {"source": f"{file} line {number}", "iscrowd": 0}
        try:
            values = [float(word) for word in words]
        except ValueError:
            rows.append({**row, "category_id": words[0], "bbox": line.strip()})
            continue
        category_id = int(values[0]) if math.isfinite(values[0]) and values[0] == int(values[0]) else values[0]
        box = _pixel_box(values[1:], h=h, w=w)
        area = {"area": box[2] * box[3]} if box is not None and all(map(math.isfinite, box)) else {}
        rows.append({**row, "category_id": category_id, "bbox": line.strip() if box is None else box, **area})
    return rows


def _pixel_box(values: list[float], *, h: int, w: int) -> list[float] | None:
    """(x, y, w, h) in pixels of a box or polygon in shares of the image; None if it is neither."""
    if len(values) == 4:
        cx, cy, box_w, box_h = values
        return [(cx - box_w / 2) * w, (cy - box_h / 2) * h, box_w * w, box_h * h]
    if len(values) >= 6 and len(values) % 2 == 0:
        xs, ys = values[::2], values[1::2]
        return [min(xs) * w, min(ys) * h, (max(xs) - min(xs)) * w, (max(ys) - min(ys)) * h]
    return None
