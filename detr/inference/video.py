"""Videos: frames in, drawn frames out. PyAV, which brings FFmpeg's libraries, is an optional package."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from detr.inference.image_sources import Moment, Skipped, SourceImage, skip


@dataclass(frozen=True)
class VideoInfo:
    """What a video says about itself.

    Attributes:
        fps: Frames a second, on average.
        num_frames: As far as it says; 0 where it does not.
    """

    fps: float
    num_frames: int


def video_info(path: Path) -> VideoInfo:
    """Read the head of a video.

    Raises:
        ImportError: PyAV is not installed.
        FileNotFoundError: There is no such file.
        ValueError: It is no video.
    """
    with _open(path) as container:
        stream = container.streams.video[0]
        fps = _frame_rate(stream)
        num_frames = stream.frames
        if not num_frames and container.duration:
            num_frames = round(container.duration / 1e6 * fps)
    return VideoInfo(fps, num_frames)


def read_frames(path: Path, *, fps: float | None = None, skipped: list[Skipped]) -> Iterator[SourceImage]:
    """The frames of a video in order, turned upright. Where decoding fails the rest is reported and left out.

    Args:
        path: The file.
        fps: Frames a second to yield, evenly; None for all, as does a number above the video's own.
        skipped: Takes the file if its rest was left out.

    Raises:
        ImportError: PyAV is not installed.
        FileNotFoundError: There is no such file.
        ValueError: It is no video.
    """
    import av

    with _open(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        rate = _frame_rate(stream)
        due_s, index = 0.0, -1
        try:
            for index, frame in enumerate(container.decode(stream)):
                time_s = index / rate if frame.time is None else frame.time
                if fps is not None:
                    # half a frame early is on time
                    if time_s + 0.5 / rate < due_s:
                        continue
                    due_s = max(due_s + 1 / fps, time_s + 0.5 / fps)
                pixels = _upright(frame.to_ndarray(format="rgb24"), frame.rotation)  # (h, w, 3)
                yield SourceImage(path, torch.from_numpy(pixels).permute(2, 0, 1), Moment(index, time_s))
        except av.error.FFmpegError as error:
            skip(skipped, path, f"decoding ended after {index + 1} frames: {error}. Truncated or broken from there")


class VideoWriter:
    """Writes pictures as an .mp4 (H.264) that browsers and players open; a context manager.

    Args:
        path: The file, made at the first picture.
        fps: Frames a second.
    """

    def __init__(self, path: Path, *, fps: float) -> None:
        self._path = path
        # 1001 for the rates of television, more for less than a frame in a quarter of an hour
        self._rate = Fraction(fps).limit_denominator(max(1001, round(1 / fps)))
        self._container: Any = None
        self._stream: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._container is not None:
            self._container.mux(self._stream.encode())
            self._container.close()

    def write(self, picture: Image.Image) -> None:
        """Append a picture; one of another size than the first is resized to it."""
        import av

        if self._container is None:
            self._container = av.open(str(self._path), "w")
            self._stream = self._container.add_stream("libx264", rate=self._rate)
            # colours are stored for two by two pixels
            self._stream.width, self._stream.height = (side + side % 2 for side in picture.size)
            self._stream.pix_fmt = "yuv420p"
        size = (self._stream.width, self._stream.height)
        fitted = picture if picture.size == size else picture.resize(size)
        frame = av.VideoFrame.from_ndarray(np.asarray(fitted.convert("RGB")), format="rgb24")
        self._container.mux(self._stream.encode(frame))


def _open(path: Path) -> Any:
    if importlib.util.find_spec("av") is None:
        raise ImportError(
            f"source={path} is a video, which the optional package av decodes; run `pip install "
            f"'deformable-detr[video]'` (or `pip install av`). Or make images of it, as with `ffmpeg -i {path} "
            "-vf fps=5 frames/%05d.jpg`, and give that folder"
        )
    import av

    if not path.is_file():
        advice = "a pattern is for images; give one video" if set("*?[") & set(path.name) else "check the path"
        raise FileNotFoundError(f"source={path}: there is no such file; {advice}")
    try:
        container = av.open(str(path))
    except av.error.FFmpegError as error:
        raise ValueError(f"source={path} cannot be decoded as a video ({error}); does it play?") from error
    if not container.streams.video:
        container.close()
        raise ValueError(f"source={path} holds no pictures, only sound or text")
    return container


def _frame_rate(stream: Any) -> float:
    """Frames a second; 25 where the file does not say."""
    return float(stream.average_rate or stream.guessed_rate or 25)


def _upright(pixels: NDArray[np.uint8], rotation: int) -> NDArray[np.uint8]:
    """(h, w, 3) as it is to be shown; `rotation` is in degrees, counterclockwise."""
    return np.ascontiguousarray(np.rot90(pixels, round(rotation / 90)))
