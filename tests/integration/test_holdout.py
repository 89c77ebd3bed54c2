"""data.holdout from the command line: exports without a validation split train, and every tool sees the same one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from detr.engine.checkpoint import load_checkpoint

Tool = Callable[..., str]

SMALL = (
    "data=custom",
    "data.root=d",
    "data.num_workers=0",
    "data.batch_size=4",
    "transforms=fixed",
    "transforms.eval.size=[64,64]",
    "backbone.name=test_resnet",
    "schedule.epochs=1",
    "device=cpu",
)
NAMES = [f"{number}.png" for number in range(20)]


def boxes(number: int) -> list[tuple[int, list[int]]]:
    """(class, [x, y, w, h]): a rare class in two images, none in every fifth image."""
    if number % 5 == 4:
        return []
    return [(0, [4, 4, 20, 20]), *([(1, [30, 30, 16, 16])] if number in (2, 12) else [])]


def images(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in NAMES:
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / name)


def cvat_coco(root: Path) -> None:
    images(root / "images/default")
    write_coco(root / "annotations/instances_default.json")


def label_studio_coco(root: Path) -> None:
    images(root / "images")
    write_coco(root / "result.json", prefix="images/", first_category=0)


def write_coco(file: Path, prefix: str = "", first_category: int = 1) -> None:
    annotations: list[dict[str, Any]] = [
        {"image_id": number, "category_id": first_category + label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for number in range(len(NAMES))
        for label, box in boxes(number)
    ]
    content = {
        "images": [{"id": i, "file_name": prefix + name, "width": 64, "height": 64} for i, name in enumerate(NAMES)],
        "categories": [{"id": first_category + label, "name": name} for label, name in enumerate(("cup", "rare"))],
        "annotations": [{"id": number, **each} for number, each in enumerate(annotations, 1)],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def label_studio_yolo(root: Path) -> None:
    images(root / "images")
    (root / "labels").mkdir()
    (root / "classes.txt").write_text("cup\nrare\n")
    (root / "notes.json").write_text('{"categories": [], "info": {}}')
    for number in range(len(NAMES)):
        lines = [
            f"{label} {(x + w / 2) / 64} {(y + h / 2) / 64} {w / 64} {h / 64}" for label, (x, y, w, h) in boxes(number)
        ]
        (root / "labels" / f"{number}.txt").write_text("\n".join(lines))


def voc(root: Path) -> None:
    images(root / "JPEGImages")
    (root / "Annotations").mkdir()
    for number in range(len(NAMES)):
        items = "".join(
            f"<object><name>{('cup', 'rare')[label]}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
            f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
            for label, (x, y, w, h) in boxes(number)
        )
        size = "<size><width>64</width><height>64</height></size>"
        (root / "Annotations" / f"{number}.xml").write_text(f"<annotation>{size}{items}</annotation>")


def names_of(ground_truth: Path) -> set[str]:
    return {Path(image["file_name"]).name for image in json.loads(ground_truth.read_text())["images"]}


@pytest.mark.parametrize("layout", [cvat_coco, label_studio_coco, label_studio_yolo, voc])
def test_an_export_without_a_split_trains_and_every_tool_sees_the_same_one(
    tool: Tool, refused: Tool, tmp_path: Path, layout: Callable[[Path], None]
):
    layout(tmp_path / "d")
    assert "data.holdout=0.1" in refused("train", *SMALL)
    command = (*SMALL, "data.holdout=0.2")
    out = tool("train", *command)
    assert "data.holdout=0.2: val is held out of train" in out
    assert "images  16, 3 of them without boxes" in out
    assert "images  4, 1 of them without boxes" in out
    # the class of two images is in both
    assert "without a box in" not in out
    checkpoint = load_checkpoint(tmp_path / "outputs/d/last.pt")
    assert checkpoint.data["train"].startswith("16 images")
    assert checkpoint.data["val"].startswith("4 images")
    assert "already has its 1 epochs" in tool("train", *command)
    tool("evaluate", "checkpoint=outputs/d/last.pt", "output_dir=scores")
    validated = names_of(tmp_path / "scores/ground_truth.json")
    assert len(validated) == 4
    assert len({"2.png", "12.png"} & validated) == 1
    # elsewhere, and written in another order
    (tmp_path / "d").rename(tmp_path / "moved")
    tool("evaluate", "checkpoint=outputs/d/last.pt", "data.root=moved", "output_dir=again")
    assert names_of(tmp_path / "again/ground_truth.json") == validated
    with pytest.raises(SystemExit):
        tool("check_dataset", "data.root=moved", "data.holdout=0.2", "report=report.json")
    report = json.loads((tmp_path / "report.json").read_text())["splits"]
    assert report["train"]["summary"]["images"] == 16
    assert report["val"]["summary"] == report["val"]["summary"] | {"images": 4, "images_without_boxes": 1}


def test_check_dataset_names_each_fault_in_the_split_of_its_image(tool: Tool, tmp_path: Path):
    cvat_coco(tmp_path / "d")
    for name in NAMES:
        (tmp_path / "d/images/default" / name).write_bytes(b"broken")
    with pytest.raises(SystemExit) as stop:
        tool("check_dataset", "data.root=d", "data.holdout=0.2", "report=report.json")
    assert stop.value.code == 1
    splits = json.loads((tmp_path / "report.json").read_text())["splits"]
    found = {
        split: {fault["image_id"] for fault in report["faults"] if fault["kind"] == "image_unreadable"}
        for split, report in splits.items()
    }
    assert len(found["val"]) == 4
    assert found["train"] | found["val"] == set(range(20))
    assert not found["train"] & found["val"]


def test_a_file_alone_is_checked_without_its_images(tool: Tool, tmp_path: Path):
    write_coco(tmp_path / "a.json")
    with pytest.raises(SystemExit) as stop:
        tool("check_dataset", "data.train.annotations=a.json", "data.holdout=0.2", "report=report.json")
    assert stop.value.code == 0
    assert set(json.loads((tmp_path / "report.json").read_text())["splits"]) == {"train", "val"}


def test_a_renamed_image_is_another_dataset(tool: Tool, tmp_path: Path):
    cvat_coco(tmp_path / "d")
    tool("train", *SMALL, "data.holdout=0.2")
    before = load_checkpoint(tmp_path / "outputs/d/last.pt").data
    file = tmp_path / "d/annotations/instances_default.json"
    file.write_text(file.read_text().replace(".png", ".renamed.png"))
    for path in (tmp_path / "d/images/default").iterdir():
        path.rename(path.with_suffix(".renamed.png"))
    tool("train", *SMALL, "data.holdout=0.2", "name=other")
    after = load_checkpoint(tmp_path / "outputs/other/last.pt").data
    # all images have one shape, so numbers and shapes alone would not tell
    assert after["val"].split(", names")[0] == before["val"].split(", names")[0]
    assert after["val"] != before["val"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.holdout=0.01", "leaves none for validation. Set it between 0.05 and 0.95"),
        ("data.holdout=2", "data.holdout must be a fraction"),
        ("data.val.annotations=v.json", "Set data.holdout=null"),
    ],
)
def test_a_holdout_that_cannot_be_is_one_line(refused: Tool, tmp_path: Path, override: str, message: str):
    cvat_coco(tmp_path / "d")
    error = refused("train", *SMALL, *(("data.holdout=0.1", override) if "val." in override else (override,)))
    assert message in error


def test_check_dataset_parses_the_file_once(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cvat_coco(tmp_path / "d")
    content = (tmp_path / "d/annotations/instances_default.json").read_text()
    parsed = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    with pytest.raises(SystemExit):
        tool("check_dataset", "data.root=d", "data.holdout=0.2", "report=report.json")
    assert parsed.count(content) == 1
