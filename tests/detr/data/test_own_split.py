"""A split that there is, one that is held out, and what is refused."""

import json
from pathlib import Path

import pytest
from PIL import Image

from detr.data import SplitSource, find_own_split, find_parts
from detr.data.layouts import Part

NOTHING = {"annotations": None, "images": None}


def write(root: Path, file: str, folder: str) -> tuple[Path, Path]:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / folder).mkdir(parents=True, exist_ok=True)
    records = [{"id": i, "file_name": f"{i}.png"} for i in range(10)]
    for record in records:
        Image.new("RGB", (8, 8)).save(root / folder / record["file_name"])
    content = {"images": records, "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    (root / file).write_text(json.dumps(content))
    return root / file, root / folder


def find(split, *, root=None, train=NOTHING, val=NOTHING, holdout=None, with_images=True):
    places = {"root": root, "train": train, "val": val, "with_images": with_images}
    return find_own_split(split, **places) if holdout is None else find_parts(**places, holdout=holdout)[split]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("file", "folder"),
    [("annotations/instances_default.json", "images"), ("train/_annotations.coco.json", "train")],
)
def test_both_splits_are_parts_of_the_images_that_there_are(tmp_path, split, file, folder):
    expected = SplitSource("coco", *write(tmp_path, file, folder), part=Part(split, 0.2))
    found = find(split, root=tmp_path, holdout=0.2)
    assert found == expected
    assert f"the {split} part of data.holdout=0.2" in str(found)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("with_images", [True, False])
def test_a_file_of_all_images_is_named_as_that_of_training(tmp_path, split, with_images):
    file, folder = write(tmp_path, "a.json", "photos")
    given = {"annotations": str(file), "images": str(folder)}
    found = find(split, train=given, holdout=0.5, with_images=with_images)
    assert found == SplitSource("coco", file, folder if with_images else Path(), part=Part(split, 0.5))


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, True, "0.1", float("nan"), [0.1]])
def test_only_fractions_are_taken(tmp_path, value):
    write(tmp_path, "a.json", "images")
    with pytest.raises(ValueError, match=r"data\.holdout must be a fraction .* such as 0\.1; got"):
        find("train", root=tmp_path, holdout=value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_validation_split_is_not_left_aside(tmp_path, split):
    write(tmp_path, "train/_annotations.coco.json", "train")
    file, _ = write(tmp_path, "valid/_annotations.coco.json", "valid")
    with pytest.raises(ValueError, match=rf"here is one: coco: {file}.*Set data.holdout=null"):
        find(split, root=tmp_path, holdout=0.1)
    assert find(split, root=tmp_path).part is None


def test_a_validation_file_that_is_named_is_not_left_aside(tmp_path):
    write(tmp_path, "train/_annotations.coco.json", "train")
    with pytest.raises(ValueError, match=r"here is one: data.val.annotations=v.json"):
        find("val", root=tmp_path, val=NOTHING | {"annotations": "v.json"}, holdout=0.1, with_images=False)


@pytest.mark.parametrize(
    ("file", "folder", "split", "message"),
    [
        ("result.json", "images", "train", "no train split under"),
        ("result.json", "images", "val", "no val split under"),
        ("train/labels.json", "train", "val", "no val split under"),
    ],
)
def test_a_missing_validation_split_says_how_to_do_without(tmp_path, file, folder, split, message):
    write(tmp_path, file, folder)
    with pytest.raises(FileNotFoundError, match=rf"(?s){message}.*{file}.*for validation: data\.holdout=0\.1$"):
        find(split, root=tmp_path)


def test_the_same_goes_for_files_that_are_named(tmp_path):
    file, folder = write(tmp_path, "a.json", "photos")
    given = {"annotations": str(file), "images": str(folder)}
    assert find("train", train=given).annotations == file
    with pytest.raises(ValueError, match=r"where is the val split\?.*data\.holdout=0\.1$"):
        find("val", train=given)


def test_it_is_not_advised_where_it_would_be_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(FileNotFoundError, match="no train split") as error:
        find("train", root=tmp_path)
    assert "holdout" not in str(error.value)
    # only the training split is missing
    write(tmp_path, "valid/labels.json", "valid")
    with pytest.raises(FileNotFoundError, match="no train split") as error:
        find("train", root=tmp_path)
    assert "holdout" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="is not a folder") as error:
        find("val", root=tmp_path / "nowhere")
    assert "holdout" not in str(error.value)


def test_nothing_and_several_to_hold_out_of_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no train split"):
        find("val", root=tmp_path, holdout=0.1)
    with pytest.raises(ValueError, match=r"Set data\.root"):
        find("val", holdout=0.1)
    write(tmp_path, "a.json", "images")
    write(tmp_path, "b.json", "images")
    with pytest.raises(ValueError, match=r"(?s)holds 2 datasets to hold images out of:.*a.json.*b.json.*data.train"):
        find("val", root=tmp_path, holdout=0.1)
