"""Checkpoint files: written whole or not at all, checked byte by byte when they are read."""

import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

_logger = logging.getLogger(__name__)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make `path` the file that `write` fills; it holds the old or the new one at every moment.

    Raises:
        OSError: The disk is full or the folder is not writable; `path` is left as it was.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        # PyTorch's zip writer raises a RuntimeError of its own while it cleans up after the file's
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(
            cause.errno, f"{cause.strerror or cause}; {path} is as it was. Make room and start the same command again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, without a moment at which `target` is half written.

    A hard link where the file system has them: checkpoints are replaced, never changed.
    """
    temporary = _temporary(target)
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def damage_in(path: Path) -> str | None:
    """What is wrong with the bytes of a file that `torch.save` wrote, or None.

    PyTorch writes a CRC-32 of every tensor and does not look at it when it reads.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if damaged is None else f"the checksum of {damaged} is wrong"


def newest_readable(paths: Iterable[Path], read: Callable[[Path], object]) -> Path | None:
    """The first of `paths` that `read` accepts, with a warning for each one before it; None without paths.

    Args:
        paths: Newest first.
        read: Raises ValueError for a damaged file.

    Raises:
        ValueError: There are files, and all are damaged.
    """
    faults = []
    for path in paths:
        try:
            read(path)
        except ValueError as error:
            faults.append(f"{path.name}: {error}")
            continue
        for fault in faults:
            _logger.warning("%s; the run goes on from %s instead", fault, path.name)
        return path
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"no checkpoint is readable:\n  {listed}\nGive another name= to start anew, or restore one")
    return None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
