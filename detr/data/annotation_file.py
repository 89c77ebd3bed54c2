"""Reading a COCO-format annotation file, and checking it once before anything trains on it."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detr.data.annotation_entries import parse_annotations
from detr.data.annotations import CocoAnnotations
from detr.data.faults import Fault, FaultyAnnotations, listed

_logger = logging.getLogger(__name__)


def load_coco_annotations(
    path: str | Path, *, need_annotations: bool = True, faulty: FaultyAnnotations = "error"
) -> CocoAnnotations:
    """Read and check a COCO-format annotation file.

    Category and image ids may be any integers in any order, also written as floats (`1.0`). Missing `iscrowd`, `area`,
    `width` and `height`, `info` and `licenses` are fine, and so is a byte order mark.

    Args:
        path: The JSON file.
        need_annotations: Whether a file without an `annotations` list is an error (files of test images have
            none).
        faulty: What to do about faulty entries: "error", or "drop" them and count them in the log.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not readable as COCO annotations, or, with "error", entries are faulty. One
            message lists the first faults and how many there are: ids that are not integers or not unique,
            boxes that are not four finite numbers, categories or images that are not in the file's lists.
    """
    path = Path(path).expanduser()
    return checked_annotations(read_json(path), path, need_annotations=need_annotations, faulty=faulty)


def checked_annotations(
    content: dict[str, Any],
    path: Path,
    *,
    need_annotations: bool = True,
    faulty: FaultyAnnotations = "error",
    reader_faults: Sequence[Fault] = (),
) -> CocoAnnotations:
    """The annotations of a COCO dict; see `load_coco_annotations`.

    Args:
        content: The dict.
        path: Where it comes from, for messages.
        need_annotations: See `load_coco_annotations`.
        faulty: See `load_coco_annotations`.
        reader_faults: What is not in the dict, as whoever made it could not use it.
    """
    annotations, entry_faults = parse_annotations(content, path, need_annotations=need_annotations)
    refuse_or_log([*reader_faults, *entry_faults], path, faulty)
    return annotations


def refuse_or_log(faults: Sequence[Fault], path: Path, faulty: FaultyAnnotations) -> None:
    """What is done about faulty entries that are left out.

    Args:
        faults: The entries.
        path: The file they are of.
        faulty: "error", or "drop" to count them in the log.

    Raises:
        ValueError: There are some, which is an error.
    """
    if faults and faulty == "error":
        raise ValueError(
            f"{path} has {len(faults)} fault(s) that training or evaluation cannot go on with:\n  "
            f"{listed([_line(fault, path) for fault in faults])}\nCorrect or remove these entries, or set "
            "data.faulty_annotations=drop"
        )
    if faults:
        _log_dropped(faults, path)


def _log_dropped(faults: Sequence[Fault], path: Path) -> None:
    """Say how many faulty entries of each kind were met, and name the first."""
    counts = ", ".join(f"{count} x {kind}" for kind, count in Counter(fault.kind for fault in faults).items())
    lines = [f"{_line(fault, path)} -> {fault.action}" for fault in faults]
    _logger.warning(
        "%s: %d faulty entries dropped or repaired (%s), data.faulty_annotations=drop:\n  %s",
        path,
        len(faults),
        counts,
        listed(lines),
    )


def _line(fault: Fault, path: Path) -> str:
    return fault.problem if fault.file == str(path) else f"{fault.file}: {fault.problem}"


def read_json(path: Path) -> dict[str, Any]:
    """The dict that a JSON file holds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not UTF-8, not JSON, or no dict.
    """
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
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be COCO annotations") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a COCO dict with 'images', 'annotations' and 'categories'; it holds a "
            f"{type(content).__name__}. (A list is the format of detections, not of annotations)"
        )
    return content
