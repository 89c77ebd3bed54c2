"""Decoded images in files that every worker, rank and run maps into memory: on a disk, or in RAM as in /dev/shm."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from detr.data.images import read_image


class ImageCache:
    """Reads images, and keeps what it decoded for the next time.

    A decoded image takes 3 bytes a pixel, six times its JPEG. Files are named by path, size, time of change and
    orientation policy, so that a changed image is decoded anew; the folder can be deleted at any time, and is never
    cleaned up.

    Args:
        folder: Where to keep them; made if it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser()

    def read(self, path: Path, *, apply_exif: bool) -> Tensor:
        """(3, h, w) uint8 RGB; see `read_image`.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The image is unreadable.
            OSError: The cache cannot be written, as where the disk is full.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return read_image(path, apply_exif=apply_exif)
        key = f"{path.absolute()}|{status.st_size}|{status.st_mtime_ns}|{apply_exif}"
        name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        file = self._folder / name[:2] / f"{name}.npy"
        if not file.is_file():
            image = read_image(path, apply_exif=apply_exif)
            self._write(file, image.permute(1, 2, 0).numpy())
            return image
        # private: a transform that writes into its image changes its own copy
        pixels = np.lib.format.open_memmap(file, mode="c")  # (h, w, 3)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _write(self, file: Path, pixels: np.ndarray) -> None:
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                np.save(stream, np.ascontiguousarray(pixels))
            partial.replace(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                f"cannot keep a decoded image in data.cache_dir={self._folder} ({error}). Free space there, or train "
                "without it: data.cache_dir=null"
            ) from error
