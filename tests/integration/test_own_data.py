"""data=custom: every usual layout gives the same dataset, and trains with one command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from detr.data import CocoDataset, EvalTransform, find_split
from detr.data.sources import load_source
from detr.engine.checkpoint import load_checkpoint

Tool = Callable[..., str]
FEW = {"train": 12, "val": 6}


@pytest.fixture(scope="module")
def few(shared_dir: Path) -> dict[str, dict[str, Any]]:
    """The first images of both splits of a real dataset, as COCO dicts with `folder`."""
    root = shared_dir / "data/bccd"
    splits = {}
    for split, count in FEW.items():
        content = json.loads((root / f"annotations/instances_{split}.json").read_text())
        content["images"] = content["images"][:count]
        ids = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids and min(a["bbox"][2:]) > 0]
        splits[split] = content | {"folder": root / split}
    return splits


def copy_images(content: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    for image in content["images"]:
        shutil.copy(content["folder"] / image["file_name"], folder)


def boxes_of(content: dict[str, Any], image: dict[str, Any]) -> list[dict[str, Any]]:
    return [annotation for annotation in content["annotations"] if annotation["image_id"] == image["id"]]


def write_json(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "folder"}))


def coco(splits: dict[str, Any], root: Path) -> None:
    for split, content in splits.items():
        copy_images(content, root / split)
        write_json(content, root / "annotations" / f"instances_{split}.json")


def roboflow_coco(splits: dict[str, Any], root: Path) -> None:
    """With the parent category that Roboflow adds, used by no box."""
    for split, content in splits.items():
        folder = root / {"train": "train", "val": "valid"}[split]
        copy_images(content, folder)
        parent = {"id": 0, "name": "cells", "supercategory": "none"}
        categories = [parent, *({**category, "supercategory": "cells"} for category in content["categories"])]
        write_json({**content, "categories": categories}, folder / "_annotations.coco.json")


def coco_named_after_the_split(splits: dict[str, Any], root: Path) -> None:
    for split, content in splits.items():
        copy_images(content, root / "images" / split)
        write_json(content, root / f"{split}.json")


def write_yolo_labels(content: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        lines = []
        for annotation in boxes_of(content, image):
            x, y, w, h = annotation["bbox"]
            W, H = image["width"], image["height"]
            values = ((x + w / 2) / W, (y + h / 2) / H, w / W, h / H)
            lines.append(f"{annotation['category_id'] - 1} " + " ".join(f"{value:.9f}" for value in values))
        (folder / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines) + "\n")


def names_of(splits: dict[str, Any]) -> list[str]:
    return [category["name"] for category in splits["train"]["categories"]]


def yolo(splits: dict[str, Any], root: Path) -> None:
    for split, content in splits.items():
        copy_images(content, root / "images" / split)
        write_yolo_labels(content, root / "labels" / split)
    (root / "classes.txt").write_text("\n".join(names_of(splits)) + "\n")


def roboflow_yolo(splits: dict[str, Any], root: Path) -> None:
    for split, content in splits.items():
        folder = root / {"train": "train", "val": "valid"}[split]
        copy_images(content, folder / "images")
        write_yolo_labels(content, folder / "labels")
    (root / "data.yaml").write_text(
        f"train: ../train/images\nval: ../valid/images\nnc: {len(names_of(splits))}\nnames: {names_of(splits)}\n"
    )


def voc_xml(content: dict[str, Any], image: dict[str, Any]) -> str:
    top = ElementTree.Element("annotation")
    ElementTree.SubElement(top, "filename").text = image["file_name"]
    size = ElementTree.SubElement(top, "size")
    for key in ("width", "height"):
        ElementTree.SubElement(size, key).text = str(image[key])
    names = {category["id"]: category["name"] for category in content["categories"]}
    for annotation in boxes_of(content, image):
        item = ElementTree.SubElement(top, "object")
        ElementTree.SubElement(item, "name").text = names[annotation["category_id"]]
        x, y, w, h = annotation["bbox"]
        corners = ElementTree.SubElement(item, "bndbox")
        for key, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + w), ("ymax", y + h)):
            ElementTree.SubElement(corners, key).text = str(value)
    return ElementTree.tostring(top, encoding="unicode")


def voc(splits: dict[str, Any], root: Path) -> None:
    (root / "Annotations").mkdir(parents=True)
    (root / "ImageSets/Main").mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    for split, content in splits.items():
        for image in content["images"]:
            shutil.copy(content["folder"] / image["file_name"], root / "JPEGImages")
            (root / "Annotations" / image["file_name"]).with_suffix(".xml").write_text(voc_xml(content, image))
        stems = [Path(image["file_name"]).stem for image in content["images"]]
        (root / f"ImageSets/Main/{split}.txt").write_text("\n".join(stems) + "\n")


def voc_beside_images(splits: dict[str, Any], root: Path) -> None:
    for split, content in splits.items():
        folder = root / {"train": "train", "val": "valid"}[split]
        copy_images(content, folder)
        for image in content["images"]:
            (folder / image["file_name"]).with_suffix(".xml").write_text(voc_xml(content, image))


LAYOUTS = (coco, roboflow_coco, coco_named_after_the_split, yolo, roboflow_yolo, voc, voc_beside_images)


def boxes_by_file(root: Path, split: str) -> dict[str, list[tuple[str, list[float]]]]:
    """The sorted (class name, [cx, cy, w, h] in shares) of each image, by file name."""
    both = {name: find_split(name, root=root, annotations=None, images=None) for name in ("train", "val")}  # type: ignore[arg-type]
    source, other = both[split], both["val" if split == "train" else "train"]
    annotations = load_source(source, other=other, need_annotations=True, apply_exif=True, faulty="error")
    dataset = CocoDataset(annotations, source.images, EvalTransform(None, None), training=True)
    found = {}
    for index in range(len(dataset)):
        _, target = dataset[index]
        names = [dataset.class_table.names[label] for label in target.labels.tolist()]
        rows = [
            (name, [round(side, 4) for side in box]) for name, box in zip(names, target.boxes.tolist(), strict=True)
        ]
        found[dataset.image_path(index).name] = sorted(rows)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_boxes(few: dict[str, Any], tmp_path: Path, layout: Callable[..., None]):
    coco(few, tmp_path / "expected")
    layout(few, tmp_path / "found")
    for split, count in FEW.items():
        expected = boxes_by_file(tmp_path / "expected", split)
        assert len(expected) == count
        assert sum(map(len, expected.values())) == len(few[split]["annotations"])
        found = boxes_by_file(tmp_path / "found", split)
        assert found.keys() == expected.keys()
        for name, rows in expected.items():
            assert [row[0] for row in found[name]] == [row[0] for row in rows]
            for (_, box), (_, wanted) in zip(found[name], rows, strict=True):
                assert box == pytest.approx(wanted, abs=2e-4)


SMALL = (
    "data=custom",
    "data.num_workers=0",
    "data.batch_size=4",
    "transforms=fixed",
    "transforms.eval.size=[64,96]",
    "backbone.name=test_resnet",
    "schedule.epochs=1",
    "device=cpu",
)


@pytest.mark.parametrize("layout", [roboflow_coco, roboflow_yolo, voc])
def test_one_command_trains_on_any_layout(few: dict[str, Any], tool: Tool, tmp_path: Path, layout: Callable[..., None]):
    layout(few, tmp_path / "cells")
    out = tool("train", *SMALL, "data.root=cells")
    # the report, the choices, and a run named after the folder
    assert "images  12, 0 of them without boxes" in out
    assert "RBC" in out
    assert "model.num_queries=100: at most" in out
    assert "optimizer=adamw_scratch: lr 0.0012" in out
    assert "outputs/cells: epoch 1, AP" in out
    checkpoint = load_checkpoint(tmp_path / "outputs/cells/last.pt")
    assert set(checkpoint.class_table.names) - {"cells"} == {"RBC", "WBC", "Platelets"}
    assert checkpoint.global_step == 3
    assert checkpoint.config["model"]["num_queries"] == 100
    # the same command goes on with the same run
    assert "already has its 1 epochs" in tool("train", *SMALL, "data.root=cells")
    tool("evaluate", "checkpoint=outputs/cells/last.pt", "output_dir=scores")
    assert (tmp_path / "scores/metrics.json").is_file()


def test_a_head_for_other_classes_starts_anew_with_a_list(few: dict[str, Any], tool: Tool, tmp_path: Path):
    coco(few, tmp_path / "cells")
    tool("train", *SMALL, "data.root=cells", "model.num_queries=60")
    fewer = {split: {**content, "categories": content["categories"][:2]} for split, content in few.items()}
    for content in fewer.values():
        content["annotations"] = [a for a in content["annotations"] if a["category_id"] < 3]
    yolo(fewer, tmp_path / "two")
    out = tool("train", *SMALL, "data.root=two", "model.num_queries=60", "init_from=outputs/cells/last.pt")
    assert "heads.class_embed.0.bias: (3,) -> (2,)" in out
    assert "rows of the class head by class name: 2 taken over (RBC, WBC)" in out
    assert "optimizer=adamw: lr 0.0002" in out


def test_what_was_chosen_stays(few: dict[str, Any], tool: Tool, tmp_path: Path):
    coco(few, tmp_path / "cells")
    out = tool("train", *SMALL, "data.root=cells", "model.num_queries=20", "optimizer.lr=0.001", "name=mine")
    assert "model.num_queries=20, but an image has" in out
    config = load_checkpoint(tmp_path / "outputs/mine/last.pt").config
    assert config["model"]["num_queries"] == 20
    assert config["optimizer"]["lr"] == 0.001
    assert config["optimizer"]["base_batch"] == 8


def test_a_root_without_a_split_says_what_it_holds(refused: Tool, tmp_path: Path):
    (tmp_path / "d" / "photos").mkdir(parents=True)
    message = refused("train", *SMALL, "data.root=d")
    assert "no train split under data.root=d, which holds photos/" in message
    assert "data.train.annotations" in message
