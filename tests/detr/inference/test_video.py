"""Videos in and out, with a video made on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detr.inference.image_sources import Moment, Skipped
from detr.inference.predict import Prediction
from detr.inference.prediction_files import write_predictions
from detr.inference.video import VideoWriter, read_frames, video_info
from detr.structures import ClassTable, Detections


def grey(level: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    return Image.new("RGB", size, (level, level, level))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """20 frames at 10 a second, each brighter than the last, as this project writes them."""
    pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with VideoWriter(path, fps=10) as writer:
        for index in range(20):
            writer.write(grey(10 * index))
    return path


def test_every_frame_comes_in_order_with_its_time(clip: Path):
    info = video_info(clip)
    assert (info.fps, info.num_frames) == (10.0, 20)
    frames = list(read_frames(clip, skipped=[]))
    assert [frame.moment for frame in frames] == [Moment(index, pytest.approx(index / 10)) for index in range(20)]
    for index, frame in enumerate(frames):
        assert frame.path == clip
        assert frame.pixels.shape == (3, 48, 64)
        assert frame.pixels.dtype == torch.uint8
        assert abs(float(frame.pixels.float().mean()) - 10 * index) < 4


@pytest.mark.parametrize(
    ("fps", "expected"), [(2, [0, 5, 10, 15]), (5, list(range(0, 20, 2))), (10, list(range(20))), (99, list(range(20)))]
)
def test_fewer_frames_are_even(clip: Path, fps: float, expected: list[int]):
    assert [frame.moment.frame for frame in read_frames(clip, fps=fps, skipped=[]) if frame.moment] == expected


def test_three_a_second_of_ten_are_six_in_two_seconds(clip: Path):
    times = [frame.moment.time_s for frame in read_frames(clip, fps=3, skipped=[]) if frame.moment]
    assert len(times) == 6
    assert max(abs(time_s - index / 3) for index, time_s in enumerate(times)) <= 0.051


def test_a_video_held_upright_is_read_upright(tmp_path: Path):
    av = pytest.importorskip("av")
    path = tmp_path / "phone.mp4"
    # left half white; shown turned counterclockwise by a quarter, the bottom half is
    lying = np.zeros((48, 64, 3), dtype=np.uint8)
    lying[:, :32] = 255
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        if not hasattr(stream, "set_display_rotation"):
            pytest.skip("this PyAV cannot write the orientation")
        stream.set_display_rotation(90)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(lying, format="rgb24")))
        container.mux(stream.encode())
    [frame] = read_frames(path, skipped=[])
    assert frame.pixels.shape == (3, 64, 48)
    assert float(frame.pixels[:, 34:].float().mean()) > 240
    assert float(frame.pixels[:, :30].float().mean()) < 15


def test_predictions_name_frame_and_time_and_are_drawn_into_a_video(clip: Path, tmp_path: Path):
    found = Detections(torch.tensor([0.9]), torch.tensor([0]), torch.tensor([[8.0, 8.0, 40.0, 40.0]]))
    predictions = [Prediction(frame, found) for frame in read_frames(clip, fps=5, skipped=[])]
    out = tmp_path / "out"
    assert write_predictions(predictions, out, ClassTable(("cat",), (7,)), video_fps=5) == (10, 10)
    assert {path.name for path in out.iterdir()} == {"predictions.json", "images.json", "clip.mp4"}
    rows = json.loads((out / "predictions.json").read_text())
    assert [(row["image_id"], row["frame"], row["time_s"]) for row in rows[:3]] == [
        (1, 0, 0.0),
        (2, 2, 0.2),
        (3, 4, 0.4),
    ]
    assert rows[0]["file_name"] == "clip.mp4"
    images = json.loads((out / "images.json").read_text())["images"]
    assert images[2]["frame"] == 4
    assert video_info(out / "clip.mp4").fps == 5.0
    plain, drawn = (
        [frame.pixels.float() for frame in read_frames(path, fps=5, skipped=[])] for path in (clip, out / "clip.mp4")
    )
    assert len(drawn) == len(plain)
    for before, after in zip(plain, drawn, strict=True):
        changed = (before - after).abs().amax(0) > 30
        assert changed[8:41, 8:41].any()
        assert not changed[44:].any()


def test_sides_that_are_odd_or_change_are_written(tmp_path: Path):
    pytest.importorskip("av")
    with VideoWriter(tmp_path / "odd.mp4", fps=29.97) as writer:
        for size in ((63, 47), (64, 48), (20, 90)):
            writer.write(grey(100, size))
    frames = list(read_frames(tmp_path / "odd.mp4", skipped=[]))
    assert [tuple(frame.pixels.shape) for frame in frames] == [(3, 48, 64)] * 3
    assert video_info(tmp_path / "odd.mp4").fps == pytest.approx(29.97, abs=1e-3)


def test_no_frame_is_no_file(tmp_path: Path):
    with VideoWriter(tmp_path / "none.mp4", fps=5):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_video_is_said(tmp_path: Path):
    pytest.importorskip("av")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ValueError, match=r"text\.mp4 cannot be decoded as a video"):
        video_info(tmp_path / "text.mp4")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        video_info(tmp_path / "gone.mp4")


def test_a_video_that_breaks_off_keeps_what_came_before(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import av

    decode = av.container.InputContainer.decode

    class Broken:
        """The container, whose fifth frame is damaged."""

        def __init__(self, container: Any) -> None:
            self._container = container

        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *error: object) -> None:
            self._container.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._container, name)

        def decode(self, stream: Any) -> Any:
            for index, frame in enumerate(decode(self._container, stream)):
                if index == 4:
                    raise av.error.InvalidDataError(1094995529, "Invalid data found", str(clip))
                yield frame

    monkeypatch.setattr("detr.inference.video._open", lambda path: Broken(av.open(str(path))))
    skipped: list[Skipped] = []
    assert len(list(read_frames(clip, skipped=skipped))) == 4
    assert "decoding ended after 4 frames" in skipped[0].reason


def test_a_missing_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "clip.mp4").write_bytes(b"")
    with pytest.raises(ImportError, match=r"(?s)pip install 'deformable-detr\[video\]'.*ffmpeg -i"):
        video_info(tmp_path / "clip.mp4")
