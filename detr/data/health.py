"""Checks a split from end to end: the annotation file, every entry, every box, every image."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from detr.coco_ids import whole_id
from detr.data.annotation_entries import is_int, parse_annotations, shortened
from detr.data.annotations import CocoAnnotations
from detr.data.coco import target_boxes
from detr.data.faults import Fault, exit_code
from detr.data.holdout import take_part
from detr.data.image_health import check_images
from detr.data.layouts import SplitSource
from detr.data.sources import read_source

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class SplitReport:
    """What a check of a split found.

    Attributes:
        source: What was checked.
        faults: Everything found, notes included.
        summary: Counts, sizes and boxes a class as plain values; empty where the file cannot be used.
    """

    source: str
    faults: list[Fault]
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """See `detr.data.faults.exit_code`."""
        return exit_code(self.faults)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        return {
            "source": self.source,
            "exit_code": self.exit_code,
            "counts": dict(Counter(fault.kind for fault in self.faults)),
            "summary": self.summary,
            "faults": [fault.to_dict() for fault in self.faults],
        }


def check_split(
    source: SplitSource,
    *,
    other: SplitSource | None = None,
    with_images: bool = True,
    apply_exif: bool = True,
    num_queries: int = 300,
    num_threads: int = 1,
) -> SplitReport:
    """Check a split; a faulty one is described, never raised about.

    Args:
        source: Where it is.
        other: The other split; see `read_source`.
        with_images: Whether to look at the image files too, decoding each.
        apply_exif: See `read_image`.
        num_queries: Of the model: more boxes in an image than this cannot all be found.
        num_threads: How many images to decode at once.
    """
    name = str(source)
    try:
        content, faults = read_source(source, other=other, apply_exif=apply_exif)
        annotations, entry_faults = parse_annotations(content, source.annotations, need_annotations=True)
    except (ValueError, OSError) as error:
        return SplitReport(name, [_fatal(source, error)])
    faults = [*faults, *entry_faults]
    if source.format == "coco":
        faults += _content_findings(content, source.annotations)
    if source.part is not None:
        try:
            annotations, faults = take_part(annotations, faults, source.part)
        except ValueError as error:
            return SplitReport(name, [_fatal(source, error)])
    faults += _category_notes(annotations, content)
    if with_images:
        try:
            image_findings, sizes = check_images(
                annotations, source.images, apply_exif=apply_exif, num_threads=num_threads
            )
        except (ValueError, OSError) as error:
            return SplitReport(name, [*faults, _fatal(source, error)])
        faults += image_findings
        annotations = replace(annotations, image_sizes=sizes)
    faults += _box_findings(annotations, num_queries)
    return SplitReport(name, faults, summarize(annotations))


def summarize(annotations: CocoAnnotations) -> dict[str, Any]:
    """Counts, sizes and boxes a class of a split, as plain values.

    Returns:
        images, images_without_boxes, boxes, crowd_boxes, max_boxes_an_image; image_sizes_px and box_sides_px as
        [least, median, largest] of the square root of the area; boxes_by_class by name, most frequent first.
    """
    num_boxes = np.diff(annotations.first_box)
    sizes = annotations.image_sizes[annotations.image_sizes[:, 0] > 0]
    # the roots first, or the product of huge sides is infinite
    sides = np.sqrt(np.clip(annotations.boxes[:, 2:], 0, None)).prod(1)
    counts = np.bincount(annotations.categories, minlength=len(annotations.category_ids))
    order = np.argsort(-counts, kind="stable")
    return {
        "images": len(annotations.image_ids),
        "images_without_boxes": int((num_boxes == 0).sum()),
        "boxes": len(annotations.boxes),
        "crowd_boxes": int(annotations.crowd.sum()),
        "max_boxes_an_image": int(num_boxes.max(initial=0)),
        "image_sizes_px": _spread(np.sqrt(sizes.prod(1).astype(np.float64))),
        "box_sides_px": _spread(sides),
        "boxes_by_class": [[annotations.category_names[index], int(counts[index])] for index in order.tolist()],
    }


def format_summary(summary: dict[str, Any], *, num_classes_listed: int = 20) -> str:
    """A few lines for people; see `summarize`."""
    if not summary:
        return "not usable"
    classes = summary["boxes_by_class"]
    shown = ", ".join(f"{name} {count}" for name, count in classes[:num_classes_listed])
    more = f", and {len(classes) - num_classes_listed} more" if len(classes) > num_classes_listed else ""
    lines = [
        f"images  {summary['images']}, {summary['images_without_boxes']} of them without boxes; side "
        f"(square root of the area; least, median, largest) {_triple(summary['image_sizes_px'])} px",
        f"boxes   {summary['boxes']}, {summary['crowd_boxes']} of them crowds; at most "
        f"{summary['max_boxes_an_image']} in an image; side {_triple(summary['box_sides_px'])} px",
        f"classes {len(classes)}: {shown}{more}",
    ]
    return "\n".join(lines)


def _fatal(source: SplitSource, error: Exception) -> Fault:
    return Fault("unusable", "fatal", str(source.annotations), str(error), "training and evaluation refuse it")


def _spread(values: np.ndarray) -> list[float]:
    return [round(float(value), 1) for value in np.quantile(values, [0, 0.5, 1])] if len(values) else []


def _triple(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values) if values else "not known"


def _content_findings(content: dict[str, Any], path: Path) -> Iterator[Fault]:
    """What a COCO file lacks or has too much of, beyond faulty entries."""
    file = str(path)
    with path.open("rb") as stream:
        if stream.read(3) == _BYTE_ORDER_MARK:
            yield Fault("byte_order_mark", "fault", file, "begins with a byte order mark", "skipped")
    for key in ("info", "licenses"):
        if key not in content:
            yield Fault(f"no_{key}", "note", file, f"has no '{key}'", "filled in for evaluation")
    for record in content["images"]:
        if record.get("height") is None and record.get("width") is None:
            image_id = whole_id(record.get("id"))
            problem = f"image {shortened(image_id)}: no width and height"
            yield Fault("size_missing", "fault", file, problem, "read from the image", image_id=image_id)
    for position, record in enumerate(content["annotations"]):
        annotation_id = whole_id(record.get("id"))
        name = f"annotation at position {position}" if annotation_id is None else f"annotation {annotation_id}"
        ids = {"image_id": whole_id(record.get("image_id")), "annotation_id": annotation_id}
        if annotation_id is None:
            yield Fault("annotation_id_missing", "fault", file, f"{name}: no id", "numbered for evaluation", **ids)
        elif is_int(annotation_id) and annotation_id == 0:
            problem = f"{name}: pycocotools takes the id 0 for no match"
            yield Fault("annotation_id_zero", "fault", file, problem, "numbered anew for evaluation", **ids)
        if record.get("iscrowd") is None:
            yield Fault("iscrowd_missing", "fault", file, f"{name}: no iscrowd", "taken as 0", **ids)
        if record.get("area") is None:
            yield Fault("area_missing", "fault", file, f"{name}: no area", "taken as w * h", **ids)


def _category_notes(annotations: CocoAnnotations, content: dict[str, Any]) -> Iterator[Fault]:
    file = str(annotations.path)
    ids, names = annotations.category_ids, annotations.category_names
    if ids[-1] - ids[0] + 1 != len(ids):
        problem = f"category ids from {ids[0]} to {ids[-1]} have gaps: {len(ids)} categories"
        yield Fault("category_id_gaps", "note", file, problem, "labels are contiguous, ids stay in the checkpoint")
    used = set(annotations.categories.tolist())
    unused = [name for index, name in enumerate(names) if index not in used]
    parents = {str(record.get("supercategory")) for record in content["categories"]}
    parent_names = [name for name in unused if name in parents]
    others = [name for name in unused if name not in parents]
    for kind, members, what in (
        ("category_unused", others, "categories without a box"),
        ("category_unused_parent", parent_names, "parent categories without a box of their own"),
    ):
        if members:
            problem = f"{len(members)} {what}: {shortened(members)}"
            yield Fault(kind, "note", file, problem, "each has a class of the head that learns to say no")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        problem = f"categories of the same name: {shortened(twice)}"
        yield Fault("category_name_twice", "note", file, problem, "each id is a class of its own")
    for kind, texts in (
        ("non_ascii_category", names),
        ("non_ascii_file_name", [annotations.file_names[index] for index in range(len(annotations.file_names))]),
    ):
        odd = [text for text in texts if not text.isascii()]
        if odd:
            yield Fault(kind, "note", file, f"{len(odd)} names are not ASCII: {shortened(odd)}", "kept")


def _box_findings(annotations: CocoAnnotations, num_queries: int) -> Iterator[Fault]:
    """Boxes that training drops or cuts, and images whose boxes it cannot use or find."""
    file = str(annotations.path)
    image_of_box = np.repeat(np.arange(len(annotations.image_ids)), np.diff(annotations.first_box))
    sized = annotations.image_sizes[:, 0] > 0
    limits = np.where(sized[:, None], annotations.image_sizes, np.iinfo(np.int64).max)
    _, kept, is_cut = target_boxes(replace(annotations, image_sizes=limits))

    def finding(row: int, kind: str, what: str, action: str) -> Fault:
        image_id = int(annotations.image_ids[image_of_box[row]])
        number = int(annotations.annotation_ids[row])
        annotation_id = None if number == -1 else number
        h, w = annotations.image_sizes[image_of_box[row]].tolist()
        size = f"{w} x {h} pixels (w x h)" if h > 0 else "unknown size"
        problem = (
            f"annotation {annotation_id}: bbox {annotations.boxes[row].tolist()} {what} image {image_id} of {size}"
        )
        return Fault(kind, "fault", file, problem, action, image_id, annotation_id)

    for row in np.flatnonzero(~kept & ~annotations.crowd).tolist():
        w, h = annotations.boxes[row, 2:].tolist()
        kind, what = "box_outside", "lies outside"
        if w < 0 or h < 0:
            kind, what = "box_negative", "has a negative side, in"
        elif w == 0 or h == 0:
            kind, what = "box_zero_size", "has no area, in"
        yield finding(row, kind, what, "dropped from training, kept in the ground truth")
    for row in np.flatnonzero(is_cut).tolist():
        yield finding(row, "box_cut", "reaches beyond", "cut at the image's edge for training")
    num_boxes = np.diff(annotations.first_box)
    num_targets = np.diff(np.concatenate(([0], np.cumsum(kept & ~annotations.crowd)))[annotations.first_box])
    num_crowds = np.diff(np.concatenate(([0], np.cumsum(annotations.crowd)))[annotations.first_box])
    for index in np.flatnonzero((num_boxes > 0) & (num_crowds == num_boxes)).tolist():
        image_id = int(annotations.image_ids[index])
        problem = f"image {image_id}: all of its {num_boxes[index]} boxes are crowds"
        yield Fault("crowd_only", "fault", file, problem, "trained on as an image without objects", image_id)
    for index in np.flatnonzero(num_targets > num_queries).tolist():
        image_id = int(annotations.image_ids[index])
        problem = f"image {image_id}: {num_targets[index]} boxes for {num_queries} queries"
        action = "the rest stays unmatched; raise model.num_queries"
        yield Fault("more_boxes_than_queries", "fault", file, problem, action, image_id)
