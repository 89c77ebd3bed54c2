from pathlib import Path

import pytest

from detr.data import SplitSource, find_coco_split, find_split


def make(root: Path, *paths: str) -> None:
    for path in paths:
        if path.endswith(".json"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        else:
            (root / path).mkdir(parents=True)


@pytest.mark.parametrize("images", ["{}", "images/{}"])
@pytest.mark.parametrize("year", ["2017", "2014", ""])
def test_each_layout_is_found(tmp_path, images, year):
    for split in ("train", "val"):
        make(tmp_path, f"annotations/instances_{split}{year}.json", images.format(split + year))
    for split in ("train", "val"):
        file, folder = find_coco_split(split, root=tmp_path, annotations=None, images=None)
        assert file == tmp_path / f"annotations/instances_{split}{year}.json"
        assert folder == tmp_path / images.format(split + year)


def test_explicit_paths_need_no_root():
    assert find_coco_split("val", root=None, annotations="a.json", images="b") == (Path("a.json"), Path("b"))


def test_one_explicit_path_is_completed_from_the_root(tmp_path):
    make(tmp_path, "annotations/instances_val2017.json", "val2017", "elsewhere.json", "photos")
    own = tmp_path / "elsewhere.json"
    assert find_coco_split("val", root=tmp_path, annotations=own, images=None) == (own, tmp_path / "val2017")
    photos = tmp_path / "photos"
    found = find_coco_split("val", root=tmp_path, annotations=None, images=photos)
    assert found == (tmp_path / "annotations/instances_val2017.json", photos)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Set data.root, or data.val.annotations and data.val.images"),
        ({"annotations": "a.json"}, "Set data.root, or data.val.images"),
    ],
)
def test_nothing_to_look_in_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        find_coco_split("val", **({"root": None, "annotations": None, "images": None} | given))


def test_a_wrong_root_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"data.root={tmp_path}/nowhere is not a folder"):
        find_coco_split("train", root=tmp_path / "nowhere", annotations=None, images=None)


def test_several_layouts_are_listed(tmp_path):
    make(tmp_path, "annotations/instances_train2017.json", "train2017", "images/train2017")
    with pytest.raises(ValueError, match="holds 2 layouts of the train split") as error:
        find_coco_split("train", root=tmp_path, annotations=None, images=None)
    assert "images/train2017" in str(error.value)
    assert "Set data.train.annotations and data.train.images" in str(error.value)


def test_no_layout_lists_what_was_tried(tmp_path):
    make(tmp_path, "annotations/instances_train2017.json", "train")
    with pytest.raises(FileNotFoundError, match="no train split") as error:
        find_coco_split("train", root=tmp_path, annotations=None, images=None)
    assert f"instances_train2017.json (found) with {tmp_path}/train2017/ (missing)" in str(error.value)
    assert f"instances_train.json (missing) with {tmp_path}/train/ (found)" in str(error.value)


def test_shared_datasets_are_found(shared_dir):
    for name, year in (("coco-mini", "2017"), ("bccd", "")):
        for split in ("train", "val"):
            file, folder = find_coco_split(split, root=shared_dir / "data" / name, annotations=None, images=None)
            assert (file.name, folder.name) == (f"instances_{split}{year}.json", split + year)


@pytest.mark.parametrize("folder", ["train", "valid", "val", "validation"])
def test_a_json_among_the_images_is_found(tmp_path, folder):
    split = "train" if folder == "train" else "val"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "_annotations.coco.json").touch()
    found = find_split(split, root=tmp_path, annotations=None, images=None)
    assert found == SplitSource("coco", tmp_path / folder / "_annotations.coco.json", tmp_path / folder)


def test_two_formats_of_one_split_are_listed(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "_annotations.coco.json").touch()
    (tmp_path / "train" / "a.xml").touch()
    with pytest.raises(ValueError, match=r"(?s)holds 2 layouts of the train split.*coco: .*voc: .*data.train.annot"):
        find_split("train", root=tmp_path, annotations=None, images=None)


def test_paths_that_are_given_are_coco_files():
    assert find_split("val", root=None, annotations="a.json", images="b") == SplitSource(
        "coco", Path("a.json"), Path("b")
    )


def test_an_unknown_layout_says_what_is_there_and_what_was_looked_for(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "readme.md").touch()
    with pytest.raises(FileNotFoundError, match=r"which holds pictures/, readme.md. Looked for COCO.*YOLO.*Pascal VOC"):
        find_split("train", root=tmp_path, annotations=None, images=None)
    with pytest.raises(ValueError, match=r"Set data\.root"):
        find_split("train", root=None, annotations=None, images=None)
