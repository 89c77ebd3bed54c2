"""A split in any format as COCO annotations."""

from pathlib import Path
from typing import Any

from detr.data.annotation_file import checked_annotations, read_json
from detr.data.annotations import CocoAnnotations
from detr.data.faults import Fault, FaultyAnnotations
from detr.data.layouts import SplitSource
from detr.data.voc import read_voc, voc_class_names
from detr.data.yolo import read_class_names, read_yolo


def load_source(
    source: SplitSource,
    *,
    other: SplitSource | None,
    need_annotations: bool,
    apply_exif: bool,
    faulty: FaultyAnnotations,
) -> CocoAnnotations:
    """The annotations of a split; see `load_coco_annotations`.

    Args:
        source: Where it is; all of its images.
        other: The other split, whose classes count as well where no file lists them.
        need_annotations: Whether a file without annotations is an error.
        apply_exif: See `read_image`.
        faulty: What to do about faulty entries.
    """
    assert source.part is None  # see `detr.data.parts`
    content, faults = read_source(source, other=other, apply_exif=apply_exif)
    return checked_annotations(
        content, source.annotations, need_annotations=need_annotations, faulty=faulty, reader_faults=faults
    )


def read_source(
    source: SplitSource, *, other: SplitSource | None, apply_exif: bool
) -> tuple[dict[str, Any], list[Fault]]:
    """A split as a COCO dict whose entries are not checked yet, and what its reader could not use.

    Where the split is a part of a dataset (`SplitSource.part`), this is the whole.

    Args:
        source: Where it is.
        other: The other split, whose classes count as well where no file lists them.
        apply_exif: See `read_image`.

    Raises:
        FileNotFoundError: A file is not there.
        ValueError: A file cannot be used at all.
    """
    if source.format == "coco":
        return (read_json(source.annotations) if source.content is None else source.content), []
    if source.format == "yolo":
        assert source.names is not None
        names = read_class_names(source.names)
        return read_yolo(names, source.images, source.annotations, apply_exif=apply_exif, listing=source.listing)
    files = _voc_files(source)
    others = [] if other is None else _voc_files(other)
    return read_voc(voc_class_names([*files, *others]), files, source.images)


def _voc_files(source: SplitSource) -> list[Path]:
    """The XML files of a split, those that are listed and missing included."""
    if source.listing is None:
        return sorted(source.annotations.glob("*.xml"))
    lines = source.listing.read_text(encoding="utf-8-sig").splitlines()
    return [source.annotations / f"{line.split()[0]}.xml" for line in lines if line.strip()]
