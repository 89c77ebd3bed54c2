import csv
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from detr.engine.precision import Precision
from detr.evaluation import PostProcess
from detr.inference.image_sources import Skipped, find_images, read_images, require_other_folder
from detr.inference.predict import Prediction, class_labels, predict
from detr.inference.prediction_files import write_predictions
from detr.structures import ClassTable, Detections, DetectorOutput, ImageBatch

CPU = torch.device("cpu")
PREPROCESSING = {"resize": {"size": 32, "max_size": None}, "apply_exif": True, "pad_to": 16}
# images keep their size
NATIVE = {**PREPROCESSING, "resize": {"size": None, "max_size": None}}


class LeftHalf(nn.Module):
    """Finds class 1 in the left half of each image with score 0.9, and class 0 all over with 0.2."""

    def forward(self, images: ImageBatch) -> DetectorOutput:
        self.seen = images
        logits = torch.tensor([[-9.0, 0.9, -9.0], [0.2, -9.0, -9.0]])
        logits = torch.where(logits > 0, logits.clamp(min=0.01).logit(), logits)
        boxes = torch.tensor([[0.25, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0]])
        N = len(images)
        return DetectorOutput(logits.expand(1, N, 2, 3), boxes.expand(1, N, 2, 4))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (80, 40), "red").save(folder / "b.jpg")
    Image.new("L", (30, 60)).save(folder / "a.png")
    Image.new("RGB", (40, 40)).save(folder / "b.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    (folder / "notes.txt").write_text("no image either")
    return folder


def predictions_on(paths: Iterable[Path], model: nn.Module | None = None, **options: Any) -> Iterator[Prediction]:
    skipped = options.pop("skipped", [])
    settings: dict[str, Any] = {"preprocessing": PREPROCESSING, "min_score": 0.5, "batch_size": 2}
    settings |= {"precision": Precision(), "device": CPU, **options}
    images = read_images(paths, apply_exif=True, skipped=skipped)
    return predict(model or LeftHalf(), images, PostProcess(), skipped=skipped, **settings)


def run(paths: Iterable[Path], **options: Any) -> list[Prediction]:
    return list(predictions_on(paths, **options))


def test_images_are_found_by_name(photos: Path):
    assert [path.name for path in find_images(photos)] == ["a.png", "b.jpg", "b.png", "broken.jpg"]
    assert find_images(photos / "b.jpg") == [photos / "b.jpg"]


def test_a_source_without_images(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="neither an image nor a folder"):
        find_images(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no image"):
        find_images(tmp_path)


def test_boxes_are_pixels_of_each_original(photos: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        predictions = run(find_images(photos))
    assert [prediction.source.path.name for prediction in predictions] == ["a.png", "b.jpg", "b.png"]
    assert [p.detections.boxes.tolist() for p in predictions] == [
        [[0.0, 0.0, 15.0, 60.0]],
        [[0.0, 0.0, 40.0, 40.0]],
        [[0.0, 0.0, 20.0, 40.0]],
    ]
    assert "broken.jpg" in caplog.text


def test_threshold_and_preprocessing(photos: Path):
    [prediction] = run([photos / "b.jpg"], min_score=0.1)
    assert prediction.detections.scores.tolist() == pytest.approx([0.9, 0.2])
    model = LeftHalf()
    run([photos / "b.jpg"], model=model)
    # 80 x 40 resized to a short side of 32
    assert model.seen.sizes.tolist() == [[32, 64]]
    with pytest.raises(ValueError, match="batch_size"):
        run([photos / "b.jpg"], batch_size=0)


def test_predictions_carry_original_ids_and_names(photos: Path, tmp_path: Path):
    table = ClassTable(("cat", "dog", ""), (7, 90, 91))
    counts = write_predictions(iter(run(find_images(photos))), tmp_path / "out", table)
    assert counts == (3, 3)
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert rows[1]["image_id"] == 2
    assert rows[1]["file_name"] == "b.jpg"
    assert (rows[1]["category_id"], rows[1]["category_name"]) == (90, "dog")
    assert rows[1]["bbox"] == [0.0, 0.0, 40.0, 40.0]
    assert rows[1]["score"] == pytest.approx(0.9)
    # b.jpg and b.png both have their picture, with something drawn on it
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"a.png", "b.png", "b.png.png"}
    drawn = Image.open(tmp_path / "out" / "b.png")
    assert drawn.size == (80, 40)
    assert len(drawn.getcolors(maxcolors=10_000)) > 1


@pytest.mark.parametrize("single", [True, False])
def test_results_do_not_go_to_the_folder_of_the_images(photos: Path, tmp_path: Path, single: bool):
    before = {path: path.read_bytes() for path in photos.iterdir()}
    paths = find_images(photos / "b.png" if single else photos)
    (tmp_path / "link").symlink_to(photos)
    for folder in (photos, photos / "../photos", tmp_path / "link"):
        with pytest.raises(ValueError, match=r"photos/\w+.png, which the drawn images could overwrite; give another"):
            require_other_folder(folder, paths)
        with pytest.raises(ValueError, match=f"output_dir={folder} is the folder of the source image"):
            write_predictions(iter(run(paths)), folder, ClassTable(("cat", "dog", ""), (7, 90, 91)))
    assert {path: path.read_bytes() for path in photos.iterdir()} == before
    # a link elsewhere whose image lies in the folder
    (tmp_path / "elsewhere.png").symlink_to(photos / "b.png")
    with pytest.raises(ValueError, match="elsewhere"):
        require_other_folder(photos, [tmp_path / "elsewhere.png"])
    require_other_folder(photos / "out", paths)
    require_other_folder(tmp_path, paths)


def test_a_source_of_which_nothing_can_be_read(photos: Path, caplog: pytest.LogCaptureFixture):
    (photos / "empty.png").write_bytes(b"")
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match="none of the 2 files of the source could be used") as error,
    ):
        run([photos / "broken.jpg", photos / "empty.png"])
    for text in (str(error.value), caplog.text):
        assert "broken.jpg: " in text
        assert "empty.png: " in text
        assert "cannot identify" in text
        assert "annotation" not in text
    assert run([]) == []


def test_rows_without_a_name_are_no_predictions(photos: Path, tmp_path: Path):
    # class 1, the better one, is a gap of label_map=category_id
    table = ClassTable(("cat", "", "dog"), (0, 1, 2))
    predictions = run([photos / "b.jpg"], min_score=0.1)
    assert predictions[0].detections.labels.tolist() == [1, 0]
    assert write_predictions(iter(predictions), tmp_path / "out", table) == (1, 1)
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [(row["category_id"], row["category_name"]) for row in rows] == [(0, "cat")]
    only_cat = [replace(predictions[0], detections=_at(predictions[0].detections, 1))]
    write_predictions(iter(only_cat), tmp_path / "cat", table)
    assert (tmp_path / "out" / "b.png").read_bytes() == (tmp_path / "cat" / "b.png").read_bytes()


def _at(detections: Detections, row: int) -> Detections:
    keep = [row]
    return Detections(detections.scores[keep], detections.labels[keep], detections.boxes[keep])


def test_folders_that_look_like_images_and_patterns(photos: Path):
    (photos / "x.jpg").mkdir()
    Image.new("RGB", (8, 8)).save(photos / "x.jpg" / "inside.jpg")
    assert [path.name for path in find_images(photos)] == ["a.png", "b.jpg", "b.png", "broken.jpg"]
    assert [path.name for path in find_images(f"{photos}/*.jpg")] == ["b.jpg", "broken.jpg"]
    assert [path.name for path in find_images(f"{photos}/**/*.jpg")] == ["b.jpg", "broken.jpg", "inside.jpg"]
    with pytest.raises(FileNotFoundError, match="fits 1 files, none of them an image"):
        find_images(f"{photos}/*.txt")
    (photos / "clip.MP4").write_bytes(b"")
    with pytest.raises(ValueError, match="ffmpeg"):
        find_images(photos / "clip.MP4")


def test_classes_by_name(photos: Path):
    names = ("cat", "dog", "")
    assert class_labels(names, ["dog"]) == [1]
    with pytest.raises(ValueError, match="did you mean cat"):
        class_labels(names, ["cats"])
    [prediction] = run([photos / "b.jpg"], min_score=0.1, labels=[0])
    assert prediction.detections.labels.tolist() == [0]


class Picky(LeftHalf):
    """Refuses batches with an image of a small height, as two-stage models do with few feature cells."""

    def forward(self, images: ImageBatch) -> DetectorOutput:
        if int(images.sizes.min()) < 30:
            raise ValueError("too few tokens")
        return super().forward(images)


def test_files_that_vanish_or_do_not_fit_cost_only_themselves(photos: Path, tmp_path: Path):
    Image.new("RGB", (20, 20)).save(photos / "c.png")
    paths = [*find_images(photos), photos / "gone.png"]
    skipped: list[Skipped] = []
    predictions = predictions_on(paths, Picky(), batch_size=3, preprocessing=NATIVE, skipped=skipped)
    counts = write_predictions(predictions, tmp_path / "out", ClassTable(("a", "b", "c"), (1, 2, 3)), skipped=skipped)
    assert counts == (3, 3)
    content = json.loads((tmp_path / "out" / "images.json").read_text())
    assert [Path(image["file_name"]).name for image in content["images"]] == ["a.png", "b.jpg", "b.png"]
    assert content["images"][1] | {"file_name": ""} == {"id": 2, "file_name": "", "width": 80, "height": 40}
    assert [Path(each["file_name"]).name for each in content["skipped"]] == ["broken.jpg", "gone.png", "c.png"]
    assert "too few tokens" in content["skipped"][2]["reason"]


def test_pictures_of_equal_names_are_all_kept(photos: Path, tmp_path: Path):
    for folder in ("one", "two", "three"):
        (photos / folder).mkdir()
        Image.new("RGB", (40, 40)).save(photos / folder / "b.jpg")
    paths = find_images(f"{photos}/*/b.jpg")
    assert len(paths) == 3
    write_predictions(iter(run(paths)), tmp_path / "out", ClassTable(("a", "b", "c"), (1, 2, 3)))
    assert len(list((tmp_path / "out").glob("*.png"))) == 3
    write_predictions(iter(run(paths)), tmp_path / "plain", ClassTable(("a", "b", "c"), (1, 2, 3)), draw=False)
    assert not list((tmp_path / "plain").glob("*.png"))


def test_odd_images(shared_dir: Path, tmp_path: Path):
    folder = shared_dir / "data" / "odd-images" / "images"
    with (folder.parent / "manifest.csv").open(newline="") as file:
        readable = {row["file"] for row in csv.DictReader(file) if row["convert_rgb"] == "ok"}
    skipped: list[Skipped] = []
    paths = find_images(folder)
    predictions = run(paths, batch_size=4, skipped=skipped)
    assert not readable & {each.path.name for each in skipped}
    assert len(predictions) + len(skipped) == len(paths)
    assert {"broken.png", "truncated_image.png"} <= {each.path.name for each in skipped}


class Full(LeftHalf):
    """A GPU that holds 48 x 80 pixels."""

    def forward(self, images: ImageBatch) -> DetectorOutput:
        if images.pixels[:, 0].numel() > 48 * 80:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(images)


def test_an_image_too_large_for_the_gpu_costs_only_itself(photos: Path):
    Image.new("RGB", (90, 90)).save(photos / "c.png")
    skipped: list[Skipped] = []
    # the batch as a whole does not fit either
    predictions = predictions_on(find_images(photos), Full(), preprocessing=NATIVE, batch_size=4, skipped=skipped)
    assert [each.source.path.name for each in predictions] == ["a.png", "b.jpg", "b.png"]
    assert skipped[-1].path.name == "c.png"
    assert "as 96 x 96 pixels; give a smaller max_size=" in skipped[-1].reason


@pytest.mark.parametrize(("size", "seen"), [(32, [4, 100]), (None, [4, 100])])
def test_an_image_without_a_limit_gets_one_and_it_is_said(
    photos: Path, caplog: pytest.LogCaptureFixture, size: int | None, seen: list[int]
):
    Image.new("RGB", (1000, 40)).save(photos / "wide.png")
    preprocessing = {**PREPROCESSING, "resize": {"size": size, "max_size": None}}
    model = LeftHalf()
    with caplog.at_level(logging.WARNING):
        [prediction] = run([photos / "wide.png"], model=model, preprocessing=preprocessing, max_size=100)
    assert model.seen.sizes.tolist() == [seen]
    # boxes are still those of the file
    assert prediction.detections.boxes.tolist() == [[0.0, 0.0, 500.0, 40.0]]
    [record] = caplog.records
    assert "wide.png, 1000 x 40 pixels, is made smaller for the model, to 100 pixels" in record.message
    assert "max_size=null" in record.message
    run([photos / "wide.png"], model=model, preprocessing=preprocessing, max_size=None)
    assert model.seen.sizes.tolist() == [[40, 1000] if size is None else [32, 800]]
    # within the limit nothing changes, and a limit of the training is kept
    caplog.clear()
    run([photos / "b.jpg"], model=model, preprocessing=preprocessing, max_size=100)
    assert model.seen.sizes.tolist() == [[40, 80] if size is None else [32, 64]]
    limited = {**PREPROCESSING, "resize": {"size": 32, "max_size": 300}}
    run([photos / "wide.png"], model=model, preprocessing=limited, max_size=100)
    assert model.seen.sizes.tolist() == [[12, 300]]
    assert caplog.records == []
