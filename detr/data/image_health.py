"""Checks image files one by one: there, readable, of the annotated size, and what has to be converted."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from detr.data.annotations import CocoAnnotations
from detr.data.faults import Fault
from detr.data.image_files import FAULTY_IMAGE_ACTION, ImageSizeError, load_checked, missing_files
from detr.data.images import read_image_size

_EXIF_ORIENTATION = 0x0112
# more than cores: on network storage the threads wait for files
_HEADER_THREADS = 16
# faults that are enough to refuse a split: decoding every image of one that was resized takes minutes
ENOUGH_FAULTS = 20


@dataclass(frozen=True)
class HeaderFaults:
    """What the headers of images say of them.

    Attributes:
        faults: The images that cannot be used, of those that were decoded.
        num_suspect: Images whose header cannot be read or does not give the annotated size.
        num_decoded: How many of these were decoded, the first in the order of the annotations.
    """

    faults: list[Fault]
    num_suspect: int
    num_decoded: int


def image_faults(annotations: CocoAnnotations, folder: Path, *, apply_exif: bool, num_threads: int) -> list[Fault]:
    """Every image that is missing, unreadable or not of its annotated size. Decodes all that are there.

    Args:
        annotations: Its images.
        folder: What its file names are relative to.
        apply_exif: See `read_image`.
        num_threads: How many to decode at once.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A name leaves the folder.
    """
    return [fault for fault, _ in _decode_all(annotations, folder, apply_exif, num_threads) if fault is not None]


def header_faults(annotations: CocoAnnotations, folder: Path, *, apply_exif: bool) -> HeaderFaults:
    """The images whose header cannot be read or does not give the annotated size, of those that are there.

    Only what the header makes suspect is decoded, and counts if decoding it fails as well; it is over when
    `ENOUGH_FAULTS` were found. So an image that is truncated after its header is not found.

    Args:
        annotations: Its images.
        folder: What its file names are relative to.
        apply_exif: See `read_image`.
    """

    def is_suspect(index: int) -> bool:
        try:
            found = read_image_size(folder / annotations.file_names[index], apply_exif=apply_exif)
        except (ValueError, OSError):
            return True
        size = tuple(annotations.image_sizes[index].tolist())
        return size[0] >= 0 and found != size

    def decode(index: int) -> Fault | None:
        size = tuple(annotations.image_sizes[index].tolist())
        path = folder / annotations.file_names[index]
        return _decode(path, int(annotations.image_ids[index]), size, apply_exif)[0]

    faults: list[Fault] = []
    num_decoded = 0
    with ThreadPoolExecutor(_HEADER_THREADS) as threads:
        suspects = np.flatnonzero(list(threads.map(is_suspect, range(len(annotations.image_ids))))).tolist()
        while num_decoded < len(suspects) and len(faults) < ENOUGH_FAULTS:
            chunk = suspects[num_decoded : num_decoded + ENOUGH_FAULTS]
            faults += [fault for fault in threads.map(decode, chunk) if fault is not None]
            num_decoded += len(chunk)
    return HeaderFaults(faults, len(suspects), num_decoded)


def check_images(
    annotations: CocoAnnotations, folder: Path, *, apply_exif: bool, num_threads: int
) -> tuple[list[Fault], NDArray[np.int64]]:
    """What `image_faults` finds, and images that are turned or converted; see there.

    Returns:
        The findings, and the (h, w) of each image (I, 2): that of the annotations, else of the file, else (-1, -1).
    """
    findings = []
    sizes = annotations.image_sizes.copy()
    for index, (fault, found) in enumerate(_decode_all(annotations, folder, apply_exif, num_threads)):
        if fault is not None:
            findings.append(fault)
            continue
        if sizes[index, 0] < 0:
            sizes[index] = found
        path = folder / annotations.file_names[index]
        findings += _conversions(path, int(annotations.image_ids[index]), apply_exif=apply_exif)
    return findings, sizes


def _decode_all(
    annotations: CocoAnnotations, folder: Path, apply_exif: bool, num_threads: int
) -> list[tuple[Fault | None, tuple[int, int]]]:
    """The fault of each image, if any, and its (h, w)."""
    missing = set(missing_files(annotations.file_names, folder, annotations.path))

    def decode(index: int) -> tuple[Fault | None, tuple[int, int]]:
        image_id = int(annotations.image_ids[index])
        path = folder / annotations.file_names[index]
        if index in missing:
            problem = f"image {image_id} is not there"
            return Fault("image_missing", "fault", str(path), problem, FAULTY_IMAGE_ACTION, image_id), (-1, -1)
        return _decode(path, image_id, tuple(annotations.image_sizes[index].tolist()), apply_exif)

    with ThreadPoolExecutor(max(1, num_threads)) as threads:
        return list(threads.map(decode, range(len(annotations.image_ids))))


def _decode(path: Path, image_id: int, size: tuple[int, int], apply_exif: bool) -> tuple[Fault | None, tuple[int, int]]:
    """The fault of an image, if any, and its (h, w)."""
    try:
        image = load_checked(path, image_id, size, apply_exif=apply_exif)
    except (ValueError, OSError) as error:
        kind = "image_size" if isinstance(error, ImageSizeError) else "image_unreadable"
        return Fault(kind, "fault", str(path), str(error), FAULTY_IMAGE_ACTION, image_id), (-1, -1)
    return None, (image.shape[1], image.shape[2])


def _conversions(path: Path, image_id: int, *, apply_exif: bool) -> list[Fault]:
    """What reading a sound image changes or leaves out, from its header."""
    with Image.open(path) as image:
        mode, has_alpha = image.mode, "A" in image.getbands() or "transparency" in image.info
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
        # the further pictures of a multi-picture JPEG are previews, not frames
        num_frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    found = []
    if orientation in range(2, 9):
        action = (
            "turned upright; its boxes must be those of the upright image"
            if apply_exif
            else "not turned (data.apply_exif=false); its boxes must be those of the image as stored"
        )
        found.append(("exif_orientation", f"EXIF orientation {orientation}", action))
    if mode.startswith("I"):
        found.append(("16_bit", "16-bit samples", "divided by 256"))
    if mode == "CMYK":
        found.append(("cmyk", "CMYK", "converted to RGB without a colour profile"))
    if has_alpha:
        found.append(("alpha", "an alpha channel or transparent colour", "transparency is dropped"))
    if num_frames > 1:
        found.append(("animation", f"{num_frames} frames", "the first one is used"))
    return [
        Fault(kind, "fault", str(path), f"image {image_id}: {what}", action, image_id) for kind, what, action in found
    ]
