"""Pictures and tables of evaluations, for loggers that take them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detr.data import SyntheticDataset
from detr.engine.checkpoint import load_checkpoint
from detr.engine.media import EvaluationMedia, detections_of_results
from detr.evaluation import to_results
from detr.structures import ClassTable, Detections, Target
from detr.telemetry.loggers import CompositeLogger, JsonlLogger
from detr.visualize import draw_comparison


class Taker:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.images: list[tuple[int, str, Mapping[str, Any]]] = []
        self.tables: list[tuple[int, str, Sequence[str], Sequence[Sequence[Any]]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_images(self, step: int, name: str, images: Mapping[str, Any]) -> None:
        self.images.append((step, name, images))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((step, name, columns, rows))

    def close(self) -> None: ...


def with_media(trainer: Callable[..., Any], data: Callable[..., Any], folder: Path, **settings: Any) -> Taker:
    """A run whose logger takes pictures."""
    taker, split = Taker(), data()
    logger = CompositeLogger([JsonlLogger(folder / "metrics.jsonl"), taker])
    run = trainer(folder, data=split, logger=logger, epochs=2, **settings)
    run.media = EvaluationMedia(logger, split.val_dataset(), num_images=run.settings.num_pictures, min_score=0.0)
    run.fit()
    return taker


def test_each_evaluation_shows_the_same_images_and_the_classes(
    trainer: Callable[..., Any], data: Callable[..., Any], tmp_path: Path
):
    taker = with_media(trainer, data, tmp_path, num_pictures=2)
    # two steps an epoch
    assert [(step, name) for step, name, _ in taker.images] == [(step, "val/truth_and_predictions") for step in (2, 4)]
    first, second = (images for _, _, images in taker.images)
    assert list(first) == list(second)
    # the first of four images, and the one in the middle
    assert list(first) == [f"image {data().val_dataset().load(index, None)[1].image_id}" for index in (0, 2)]
    for caption in first:
        assert first[caption].dtype == np.uint8
        assert first[caption].shape == (512, 1024, 3)
        truth = slice(0, 512)
        np.testing.assert_array_equal(first[caption][:, truth], second[caption][:, truth])
        assert (first[caption] != second[caption]).any()

    assert [(step, name) for step, name, *_ in taker.tables] == [
        (2, "val/classes"),
        (4, "val/classes"),
        (4, "summary"),
    ]
    metrics = load_checkpoint(tmp_path / "last.pt").metrics
    _, _, columns, rows = taker.tables[1]
    assert columns == ["class", "objects", "AP"]
    assert {name: ap for name, _, ap in rows} == metrics["per_class"]
    num_boxes = sum(len(data().val_dataset().load(index, None)[1].labels) for index in range(4))
    assert sum(number for _, number, _ in rows) == num_boxes
    summary = dict(taker.tables[2][3])
    assert summary["last AP"] == metrics["AP"]
    assert (summary["epochs"], summary["optimizer steps"]) == (2.0, 4.0)
    assert summary["best AP"] >= summary["last AP"]


def test_a_run_is_the_same_with_pictures(
    trainer: Callable[..., Any], data: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
):
    with_media(trainer, data, tmp_path / "with")
    trainer(tmp_path / "without", epochs=2).fit()
    one, other = (load_checkpoint(tmp_path / name / "last.pt") for name in ("with", "without"))
    for field in ("model", "optimizer", "random_states", "metrics"):
        assert_same(getattr(one, field), getattr(other, field), field)


def test_no_pictures_are_a_choice(trainer: Callable[..., Any], data: Callable[..., Any], tmp_path: Path):
    taker = with_media(trainer, data, tmp_path, num_pictures=0)
    assert all(images == {} for _, _, images in taker.images)
    assert len(taker.tables) == 3


def test_an_image_that_is_gone_costs_its_picture_only(
    trainer: Callable[..., Any],
    data: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    load = SyntheticDataset.load
    num_reads = dict.fromkeys(range(4), 0)

    def gone(self: SyntheticDataset, index: int, batch_draw: float | None) -> Any:
        # the evaluation reads it, then it is gone
        if self is split.val_dataset():
            num_reads[index] += 1
            if index == 1 and num_reads[index] > 1:
                raise FileNotFoundError("b.jpg is gone")
        return load(self, index, batch_draw)

    split = data()
    monkeypatch.setattr(SyntheticDataset, "load", gone)
    taker = Taker()
    run = trainer(tmp_path, data=split, epochs=1)
    run.media = EvaluationMedia(CompositeLogger([taker]), split.val_dataset())
    with caplog.at_level("WARNING"):
        run.fit()
    assert [len(images) for _, _, images in taker.images] == [3]
    assert "no picture of a validation image: b.jpg is gone" in caplog.text


def test_detections_survive_the_result_format():
    table = ClassTable(("cat", "dog"), (7, 90))
    found = Detections(torch.tensor([0.9, 0.4]), torch.tensor([1, 0]), torch.tensor([[1.0, 2, 3, 5], [0, 0, 9, 9]]))
    again = detections_of_results(to_results(3, found, table)[::-1], table)
    for name in ("scores", "labels", "boxes"):
        torch.testing.assert_close(getattr(again, name), getattr(found, name))
    assert detections_of_results([], table).boxes.shape == (0, 4)


def test_boxes_of_the_original_image_are_drawn_on_the_resized_one():
    # 40 x 80 in the file, resized to 20 x 40; both boxes cover its right half
    target = Target(torch.tensor([0]), torch.tensor([[0.75, 0.5, 0.5, 1.0]]), image_id=1, orig_size=(40, 80))
    found = Detections(torch.tensor([0.9, 0.1]), torch.tensor([0, 0]), torch.tensor([[40.0, 0, 80, 40], [0, 0, 9, 9]]))
    picture = np.asarray(
        draw_comparison(torch.full((3, 20, 40), 90, dtype=torch.uint8), target, found, [""], side_px=200)
    )
    assert picture.shape == (100, 400, 3)
    changed = (picture != 90).any(-1)
    for left in (0, 200):
        # a box's left side is in the middle, to a line's width; nothing is drawn on the left half
        assert not changed[:, left : left + 99].any()
        assert changed[50:, left + 100].all()
