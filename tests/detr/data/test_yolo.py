import numpy as np
import pytest
from PIL import Image

from detr.data import SplitSource, check_split, find_split
from detr.data.sources import load_source
from detr.data.yolo import read_class_names, read_yolo


@pytest.fixture
def root(tmp_path):
    """Images 40 x 20 (w x h) with label files: one box, none, and no file at all."""
    for split in ("train", "val"):
        for name in ("a", "b", "c"):
            folder = tmp_path / "images" / split
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 20)).save(folder / f"{name}.png")
        labels = tmp_path / "labels" / split
        labels.mkdir(parents=True)
        (labels / "a.txt").write_text("1 0.5 0.5 0.25 0.5\n")
        (labels / "b.txt").write_text("\n")
    (tmp_path / "data.yaml").write_text("names:\n  0: cat\n  1: dog\n")
    return tmp_path


def load(root, faulty="error"):
    source = find_split("train", root=root, annotations=None, images=None)
    return load_source(source, other=None, need_annotations=True, apply_exif=True, faulty=faulty)


def test_shares_become_pixels_and_images_without_labels_stay(root):
    annotations = load(root)
    assert annotations.boxes.tolist() == [[15, 5, 10, 10]]
    assert annotations.areas.tolist() == [100]
    assert annotations.first_box.tolist() == [0, 1, 1, 1]
    assert annotations.class_table("contiguous").category_ids == (0, 1)
    assert annotations.category_names == ("cat", "dog")
    assert annotations.image_sizes.tolist() == [[20, 40]] * 3


def test_polygons_become_the_boxes_around_them(root):
    (root / "labels/train/a.txt").write_text("0 0.25 0.5 0.5 0.25 0.75 1.0\n")
    assert load(root).boxes.tolist() == [[10, 5, 20, 15]]


def test_images_in_subfolders_have_labels_in_subfolders(root):
    (root / "images/train/sub").mkdir()
    (root / "labels/train/sub").mkdir()
    Image.new("RGB", (10, 10)).save(root / "images/train/sub/d.jpg")
    (root / "labels/train/sub/d.txt").write_text("0 0.5 0.5 1 1\n")
    annotations = load(root)
    assert annotations.file_names[3] == "sub/d.jpg"
    assert annotations.boxes[1].tolist() == [0, 0, 10, 10]


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("2 0.5 0.5 0.1 0.1", "category_id_unknown", "a.txt line 2: category_id 2 is unknown"),
        ("1.5 0.5 0.5 0.1 0.1", "category_id", "a.txt line 2: category_id must be an integer"),
        ("cat 0.5 0.5 0.1 0.1", "category_id", "a.txt line 2: category_id must be an integer; got 'cat'"),
        ("1 0.5 0.5 0.1", "box", "a.txt line 2: bbox must be four numbers"),
        ("1", "box", "a.txt line 2: bbox must be four numbers"),
        ("1 0.5 0.5 0.1 x", "box", "a.txt line 2: bbox must be four numbers"),
        ("1 nan 0.5 0.1 0.1", "box_not_finite", "a.txt line 2: bbox must be finite"),
        ("1 0.5 0.5 0 0.1", "box_zero_size", "bbox [20.0, 9.0, 0.0, 2.0] has no area"),
        ("1 0.5 0.5 2 0.1", "box_cut", "reaches beyond image 1"),
    ],
)
def test_faulty_lines_are_named(root, text, kind, words):
    (root / "labels/train/a.txt").write_text("1 0.5 0.5 0.25 0.5\n" + text + "\n")
    source = find_split("train", root=root, annotations=None, images=None)
    report = check_split(source)
    assert report.exit_code == 1
    assert any(fault.kind == kind and words in fault.problem for fault in report.faults), report.faults
    if "line 2" in words:
        with pytest.raises(ValueError, match=words):
            load(root)
        assert len(load(root, faulty="drop").boxes) == 1


def test_labels_without_an_image_are_named(root):
    (root / "labels/train/gone.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    report = check_split(find_split("train", root=root, annotations=None, images=None))
    (fault,) = report.faults[:1]
    assert (fault.kind, fault.severity) == ("label_without_image", "fault")
    assert fault.file.endswith("gone.txt")


def test_an_unreadable_image_is_named_as_such(root):
    (root / "images/train/a.png").write_bytes(b"no image")
    report = check_split(find_split("train", root=root, annotations=None, images=None))
    assert "image_unreadable" in {fault.kind for fault in report.faults}


def test_boxes_are_of_the_upright_image(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((40, 20, 3), dtype=np.uint8)).save(root / "images/train/a.png", exif=exif)
    assert load(root).boxes.tolist() == [[15, 5, 10, 10]]
    content, _ = read_yolo(["cat", "dog"], root / "images/train", root / "labels/train", apply_exif=False)
    assert content["annotations"][0]["bbox"] == [7.5, 10, 5, 20]


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("data.yaml", "names: [cat, dog]\n", ["cat", "dog"]),
        ("data.yaml", "names: {1: dog, 0: cat}\n", ["cat", "dog"]),
        ("data.yaml", "names: [1, 2]\n", ["1", "2"]),
        ("classes.txt", "\ufeffcat\nwild dog\n\n", ["cat", "wild dog"]),
    ],
)
def test_class_names_are_read(tmp_path, name, text, names):
    (tmp_path / name).write_text(text)
    assert read_class_names(tmp_path / name) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: {1: dog, 2: cat}\n", "must have the class numbers 0 to 1"),
        ("nc: 2\n", "needs a list 'names'"),
        ("names: [", "is not valid YAML"),
        ("- a\n", "needs a list 'names'"),
    ],
)
def test_unusable_names_are_refused(tmp_path, text, message):
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_class_names(tmp_path / "data.yaml")


def test_the_folder_that_the_yaml_names_is_found(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "set" / "images" / f"{split}_2024").mkdir(parents=True)
        (tmp_path / "set" / "labels" / f"{split}_2024").mkdir(parents=True)
        (tmp_path / "set" / "labels" / f"{split}_2024" / "a.txt").write_text("")
    (tmp_path / "data.yaml").write_text("names: [cat]\ntrain: ../set/images/train_2024\nval: set/images/val_2024\n")
    for split in ("train", "val"):
        source = find_split(split, root=tmp_path, annotations=None, images=None)
        assert source == SplitSource(
            "yolo",
            tmp_path / f"set/labels/{split}_2024",
            tmp_path / f"set/images/{split}_2024",
            names=tmp_path / "data.yaml",
        )


@pytest.mark.parametrize("prefix", ["", "./", "data/", "../elsewhere/", "/home/me/set/"])
def test_a_split_that_the_yaml_lists_in_a_text_file_is_what_is_listed(root, prefix):
    """Also where folders of the split's name hold more images, and whatever folder the list was written for."""
    (root / "data.yaml").write_text("train: train.txt\nval: ./val.txt\nnames: [cat, dog]\n")
    (root / "train.txt").write_text(f"{prefix}images/train/a.png\n{prefix}images/val/b.png\n\n")
    (root / "val.txt").write_text(f"{prefix}images/train/c.png\n")
    annotations = load(root)
    assert list(annotations.file_names) == ["images/train/a.png", "images/val/b.png"]
    assert annotations.boxes.tolist() == [[15, 5, 10, 10]]
    source = find_split("val", root=root, annotations=None, images=None)
    assert list(load_source(source, other=None, need_annotations=True, apply_exif=True, faulty="error").file_names) == [
        "images/train/c.png"
    ]


def test_listed_images_may_have_their_labels_beside_them(tmp_path):
    (tmp_path / "obj_train_data").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "obj_train_data/a.png")
    (tmp_path / "obj_train_data/a.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    (tmp_path / "data.yaml").write_text("train: train.txt\nnames: [cat]\n")
    (tmp_path / "train.txt").write_text("data/obj_train_data/a.png\n")
    assert load(tmp_path).boxes.tolist() == [[15, 5, 10, 10]]


def test_a_listed_image_that_is_missing_is_named(root):
    (root / "data.yaml").write_text("train: train.txt\nnames: [cat, dog]\n")
    (root / "train.txt").write_text("images/train/a.png\nimages/train/gone.png\n")
    report = check_split(find_split("train", root=root, annotations=None, images=None))
    (fault,) = [fault for fault in report.faults if fault.kind == "image_missing"]
    assert fault.file.endswith("images/train/gone.png")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("train.txt", FileNotFoundError, "train.txt lists the images of the train split, but there is no such file"),
        ("[images/train, images/val]", ValueError, "names 2 places for the train split .* Name one folder"),
    ],
)
def test_what_the_yaml_names_is_never_replaced_by_a_folder_of_the_usual_name(root, value, error, message):
    (root / "data.yaml").write_text(f"train: {value}\nnames: [cat, dog]\n")
    with pytest.raises(error, match=message):
        find_split("train", root=root, annotations=None, images=None)


def test_a_list_of_nothing_is_refused(root):
    (root / "data.yaml").write_text("train: train.txt\nnames: [cat, dog]\n")
    (root / "train.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"train.txt lists no images"):
        load(root)
