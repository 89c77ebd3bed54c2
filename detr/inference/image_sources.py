"""Where the images of a prediction come from: files, folders and patterns."""

import glob
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from detr.data import IMAGE_SUFFIXES, read_image

VIDEO_SUFFIXES = frozenset((".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v"))

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """Where in a video a frame is.

    Attributes:
        frame: Its number, from 0, skipped frames counted.
        time_s: Seconds from the start.
    """

    frame: int
    time_s: float


@dataclass(frozen=True)
class SourceImage:
    """An image to predict on.

    Attributes:
        path: The file it comes from.
        pixels: (3, h, w) uint8 RGB, turned upright.
        moment: Of a frame of a video; None for an image file.
    """

    path: Path
    pixels: Tensor
    moment: Moment | None = None


@dataclass(frozen=True)
class Skipped:
    """A file without a prediction, and why."""

    path: Path
    reason: str


def skip(skipped: list[Skipped], path: Path, reason: object) -> None:
    """Report a file that is left out, and keep it."""
    skipped.append(Skipped(path, str(reason)))
    _logger.warning("left out %s: %s", path, reason)


def is_video(source: str | Path) -> bool:
    """Whether `source` is called like a video."""
    return Path(source).suffix.lower() in VIDEO_SUFFIXES


def find_images(source: str | Path) -> list[Path]:
    """The image files that `source` stands for, by name.

    Args:
        source: An image file, a folder (images directly in it), or a pattern such as photos/**/*.jpg.

    Raises:
        FileNotFoundError: There is nothing of that name, or nothing fits the pattern.
        ValueError: The folder holds no image, or `source` is a video.
    """
    source = Path(source).expanduser()
    if source.is_file():
        if is_video(source):
            raise ValueError(
                f"source={source} is a video, where images are needed; make images of it first, as with "
                f"`ffmpeg -i {source} -vf fps=5 frames/%05d.jpg`, and give that folder"
            )
        return [source]
    if not source.is_dir():
        if glob.has_magic(str(source)):
            return _images_of_pattern(source)
        raise FileNotFoundError(f"source={source} is neither an image nor a folder; check the path")
    paths = sorted(path for path in source.iterdir() if _is_image_file(path))
    if not paths:
        raise ValueError(
            f"source={source} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}); give a folder of images, or "
            f"source='{source}/**/*.jpg' for its subfolders"
        )
    return paths


def read_images(paths: Iterable[Path], *, apply_exif: bool, skipped: list[Skipped]) -> Iterator[SourceImage]:
    """The images of files, in order. A file that cannot be read is reported and left out.

    Args:
        paths: Image files.
        apply_exif: Of `read_image`.
        skipped: Takes the files that were left out.
    """
    for path in paths:
        try:
            pixels = read_image(path, apply_exif=apply_exif)
        except (ValueError, OSError) as error:
            # the advice of `read_image` is for datasets; what it found is the cause
            skip(skipped, path, f"{error.__cause__ or error}. Truncated, broken or not an image")
        else:
            yield SourceImage(path, pixels)


def require_other_folder(folder: str | Path, paths: Iterable[Path]) -> None:
    """Refuse to write results next to the images they come from, which the drawn ones would replace.

    Args:
        folder: Where the results go; need not exist.
        paths: The image files, or links to them.

    Raises:
        ValueError: `folder` holds one of the images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    for path in paths:
        # a link may lead to an image in the folder, and the folder may be a link itself
        if any(parent.is_dir() and parent.samefile(folder) for parent in {path.parent, path.resolve().parent}):
            raise ValueError(
                f"output_dir={folder} is the folder of the source image {path}, which the drawn images could "
                "overwrite; give another output_dir= or name="
            )


def _images_of_pattern(pattern: Path) -> list[Path]:
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    images = [path for path in found if _is_image_file(path)]
    if not images:
        raise FileNotFoundError(
            f"source={pattern} fits {len(found)} files, none of them an image ({', '.join(sorted(IMAGE_SUFFIXES))}); "
            "check the pattern, and quote it for the shell"
        )
    return images


def _is_image_file(path: Path) -> bool:
    # a folder may be called x.jpg
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
