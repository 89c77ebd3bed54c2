"""What exports without a split look like, and which folder a COCO file means."""

import json
from pathlib import Path

import pytest
from PIL import Image

from detr.data import SplitSource, find_split
from detr.data.undivided import undivided_sources

NAMES = ("a.jpg", "b.jpg", "c.jpg")


def images(folder: Path, names=NAMES) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)


def coco(path: Path, names=NAMES, prefix: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"id": i, "file_name": prefix + name, "width": 8, "height": 8} for i, name in enumerate(names)]
    path.write_text(json.dumps({"images": records, "annotations": [], "categories": [{"id": 1, "name": "x"}]}))


def texts(folder: Path, suffix: str, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).with_suffix(suffix).write_text(content)


@pytest.mark.parametrize(
    ("file", "folder", "prefix"),
    [
        ("annotations/instances_default.json", "images/default", ""),  # CVAT
        ("annotations/instances_default.json", "images", ""),
        ("result.json", ".", "images/"),  # Label Studio
        ("result.json", "images", ""),
        ("labels.json", "data", ""),  # FiftyOne
        ("_annotations.coco.json", ".", ""),
        ("birds.json", "birds", ""),
        ("annotations/all.json", "annotations", ""),
    ],
)
def test_a_single_coco_file_is_found_with_the_folder_of_its_images(tmp_path, file, folder, prefix):
    coco(tmp_path / file, prefix=prefix)
    images(tmp_path / folder / prefix)
    # not where the images are
    (tmp_path / "images").mkdir(exist_ok=True)
    (tmp_path / "notes.json").write_text('{"categories": [], "info": {}}')
    (tmp_path / "broken.json").write_text("{")
    assert undivided_sources(tmp_path) == [SplitSource("coco", tmp_path / file, tmp_path / folder)]


def test_names_that_leave_the_folder_do_not_choose_it(tmp_path):
    images(tmp_path / "images")
    coco(tmp_path / "d/result.json", ["../images/a.jpg"])
    assert undivided_sources(tmp_path / "d")[0].images == tmp_path / "d"


@pytest.mark.parametrize("content", ["[]", "null", '{"images": 3}', '{"images": [], "annotations": {}}'])
def test_other_json_files_are_no_annotations(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert undivided_sources(tmp_path) == []


def test_faulty_image_records_are_left_to_the_checks(tmp_path):
    content = {"images": [3, {"file_name": 7}, {}, {"file_name": ""}], "annotations": [], "categories": []}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert undivided_sources(tmp_path) == [SplitSource("coco", tmp_path / "a.json", tmp_path)]


@pytest.mark.parametrize(
    ("folder", "labels", "names"),
    [
        ("images", "labels", "classes.txt"),  # Label Studio
        ("images", "images", "data.yaml"),
        (".", ".", "classes.txt"),
        ("obj_train_data", "obj_train_data", "obj.names"),  # CVAT
    ],
)
def test_yolo_with_one_folder_is_found(tmp_path, folder, labels, names):
    images(tmp_path / folder)
    texts(tmp_path / labels, ".txt", "0 0.5 0.5 0.5 0.5\n")
    (tmp_path / names).write_text("names: [x]\n" if names.endswith(".yaml") else "x\n")
    (tmp_path / "train.txt").write_text("data/obj_train_data/a.jpg\n")
    expected = SplitSource("yolo", tmp_path / labels, tmp_path / folder, names=tmp_path / names)
    assert undivided_sources(tmp_path) == [expected]


def test_a_validation_folder_of_cvat_is_not_left_aside(tmp_path):
    for name in ("obj_train_data", "obj_valid_data"):
        images(tmp_path / name)
        texts(tmp_path / name, ".txt", "0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "obj.names").write_text("x\n")
    assert undivided_sources(tmp_path) == []


def test_text_files_of_no_image_are_no_labels(tmp_path):
    images(tmp_path)
    for name in ("classes.txt", "readme.txt"):
        (tmp_path / name).write_text("x\n")
    assert undivided_sources(tmp_path) == []


@pytest.mark.parametrize(
    ("annotations", "folder"),
    [("Annotations", "JPEGImages"), ("Annotations", "images"), ("annotations", "images"), (".", ".")],
)
@pytest.mark.parametrize("listing", [None, "trainval.txt", "default.txt"])
def test_voc_without_a_split_is_found(tmp_path, annotations, folder, listing):
    images(tmp_path / folder)
    texts(tmp_path / annotations, ".xml", "<annotation/>")
    if listing is not None:
        (tmp_path / "ImageSets/Main").mkdir(parents=True)
        (tmp_path / "ImageSets/Main" / listing).write_text("a\nb\n")
    used = tmp_path / "ImageSets/Main/trainval.txt" if listing == "trainval.txt" else None
    expected = SplitSource("voc", tmp_path / annotations, tmp_path / folder, listing=used)
    assert undivided_sources(tmp_path) == [expected]


def test_the_own_format_of_cvat_is_no_voc(tmp_path):
    images(tmp_path / "images")
    (tmp_path / "annotations.xml").write_text("<annotations/>")
    assert undivided_sources(tmp_path) == []


def test_none_of_this_is_taken_for_a_split(tmp_path):
    coco(tmp_path / "annotations/instances_default.json")
    images(tmp_path / "images/default")
    for split in ("train", "val"):
        with pytest.raises(FileNotFoundError, match=f"no {split} split"):
            find_split(split, root=tmp_path, annotations=None, images=None)
