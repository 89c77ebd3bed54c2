"""The image files of an annotation file: whether they are there, readable, and of the size it gives."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from detr.data.annotations import CocoAnnotations, PackedStrings
from detr.data.faults import Fault
from detr.data.image_cache import ImageCache
from detr.data.images import read_image


class ImageSizeError(ValueError):
    """An image does not have the size that its annotations give."""


FAULTY_IMAGE_ACTION = "skipped with data.faulty_images=skip; with error training does not start"


def missing_files(file_names: PackedStrings, folder: Path, annotations: Path) -> list[int]:
    """Which of `file_names`, by index, are no files of `folder`. Lists each folder once, opens no file.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A name leaves the folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no image folder {folder.absolute()}. Correct the path")
    present: dict[str, set[str]] = {}
    missing = []
    for index in range(len(file_names)):
        name = file_names[index]
        relative = os.path.normpath(name)
        if leaves_folder(name):
            raise ValueError(
                f"{annotations} names the image file {name!r}, which is outside the image folder {folder}. "
                "File names must be relative to the folder and stay in it"
            )
        parent, base = os.path.split(relative)
        if parent not in present:
            present[parent] = _file_names_in(folder / parent)
        if base not in present[parent]:
            missing.append(index)
    return missing


def leaves_folder(name: str) -> bool:
    """Whether a relative file name is absolute, climbs out of its folder, or is none at all."""
    relative = os.path.normpath(name)
    return os.path.isabs(name) or relative == ".." or relative.startswith(f"..{os.sep}") or "\0" in name


def load_checked(
    path: Path, image_id: int, size: tuple[int, int], *, apply_exif: bool, cache: ImageCache | None = None
) -> Tensor:
    """The image (3, h, w) uint8 RGB, which must have the (h, w) that the annotations give.

    Args:
        path: The file.
        image_id: Its id, for messages.
        size: (h, w) in pixels; (-1, -1) takes any.
        apply_exif: See `read_image`.
        cache: Where decoded images are kept; None: nowhere.

    Raises:
        ValueError: The image is unreadable or, as `ImageSizeError`, of another size.
        FileNotFoundError: It is not there.
    """
    try:
        image = (read_image if cache is None else cache.read)(path, apply_exif=apply_exif)
    except ValueError as error:
        raise ValueError(f"image {image_id}: {error}") from error
    found = (image.shape[1], image.shape[2])
    if size[0] > 0 and found != size:
        raise ImageSizeError(_size_message(image_id, path, found, size, apply_exif=apply_exif))
    return image


def sound_images(annotations: CocoAnnotations, faults: Sequence[Fault]) -> NDArray[np.bool_]:
    """(I,) the images that no fault is about."""
    return ~np.isin(annotations.image_ids, [fault.image_id for fault in faults])


def _file_names_in(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


def _size_message(
    image_id: int, path: Path, found: tuple[int, int], given: tuple[int, int], *, apply_exif: bool
) -> str:
    message = (
        f"image {image_id} ({path}) is {found[1]} x {found[0]} pixels (w x h) "
        f"{'after' if apply_exif else 'without'} EXIF rotation, but its annotations say {given[1]} x {given[0]}"
    )
    if found != (given[1], given[0]):
        return f"{message}, so its boxes would be wrong. Correct the annotations or the image"
    return (
        f"{message}: width and height are swapped. If the boxes were drawn on the image "
        f"{'without' if apply_exif else 'after'} the rotation set data.apply_exif={'false' if apply_exif else 'true'}; "
        "otherwise correct width and height in the annotations"
    )
