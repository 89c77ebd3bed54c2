"""Pascal VOC XML files as a COCO dict: one file an image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from detr.data.faults import Fault
from detr.data.images import IMAGE_SUFFIXES


def voc_class_names(files: Sequence[Path]) -> list[str]:
    """The names of all objects in some XML files, sorted; unreadable files have none."""
    names = set()
    for file in files:
        try:
            tree = ElementTree.parse(file)
        except (ElementTree.ParseError, OSError):
            continue  # named by `read_voc`
        names |= {(item.findtext("name") or "").strip() for item in tree.iter("object")}
    return sorted(names - {""})


def read_voc(names: Sequence[str], files: Sequence[Path], images: Path) -> tuple[dict[str, Any], list[Fault]]:
    """Images and boxes of a split as a COCO dict, and the files that cannot be read.

    Corners are whole pixels counted from 1, both included, as in Pascal VOC: (1, 1, w, h) is the whole image.
    Objects marked `difficult` are objects like the others. Category ids count from 1.

    Args:
        names: The class names, first to last.
        files: One XML file an image.
        images: The folder of the images, which have the names of the XML files.
    """
    category_ids = {name: category_id for category_id, name in enumerate(names, 1)}
    image_names = {path.stem: path.name for path in images.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    faults = []
    for file in files:
        try:
            root = ElementTree.parse(file).getroot()
        except (ElementTree.ParseError, OSError) as error:
            faults.append(Fault("xml_unreadable", "fault", str(file), f"is not valid XML ({error})", "dropped"))
            continue
        image_id = len(records) + 1
        record: dict[str, Any] = {
            "id": image_id,
            # a file that is missing keeps the name it should have
            "file_name": image_names.get(file.stem) or root.findtext("filename") or f"{file.stem}.jpg",
        }
        if root.find("size") is not None:
            record |= {"height": _number(root.findtext("size/height")), "width": _number(root.findtext("size/width"))}
        records.append(record)
        for number, item in enumerate(root.iter("object"), 1):
            name = (item.findtext("name") or "").strip()
            corners = [_number(item.findtext(f"bndbox/{corner}")) for corner in ("xmin", "ymin", "xmax", "ymax")]
            row = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": category_ids.get(name, name),
                "iscrowd": 0,
                "source": f"{file} object {number}",
            }
            annotations.append(row | _box(corners))
    categories = [{"id": category_id, "name": name} for name, category_id in category_ids.items()]
    return {"info": {}, "licenses": [], "images": records, "categories": categories, "annotations": annotations}, faults


def _number(text: str | None) -> float | str | None:
    """The number in an XML text; what is none comes back as it is, to be named as faulty."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return text


def _box(corners: list[float | str | None]) -> dict[str, Any]:
    """`bbox` and `area` from corners that count from 1; faulty corners as they are."""
    numbers = [corner for corner in corners if isinstance(corner, float)]
    if len(numbers) < 4:
        return {"bbox": corners}
    # tools that count from 0 write xmin = 0, which then means the edge as well
    x0, y0 = (max(corner - 1, 0.0) if corner >= 0 else corner for corner in numbers[:2])
    w, h = numbers[2] - x0, numbers[3] - y0
    return {"bbox": [x0, y0, w, h], "area": w * h}
