"""A dataset that is not divided is read once, whatever is asked of its two parts."""

import json
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from detr.data import custom_data, find_parts, parts
from detr.data.parts import Parts
from detr.data.transforms import EvalTransform

NOTHING = {"annotations": None, "images": None}
NUM_IMAGES = 10


def write_coco(root: Path, *, faulty_image: int | None = None) -> Path:
    """Ten images with a box each; one may have a second box of no class."""
    records = [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in range(NUM_IMAGES)]
    boxes = [{"id": i + 1, "image_id": i, "category_id": 1, "bbox": [1, 1, 4, 4]} for i in range(NUM_IMAGES)]
    if faulty_image is not None:
        boxes.append({"id": 100, "image_id": faulty_image, "category_id": 9, "bbox": [1, 1, 4, 4]})
    content = {"images": records, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}
    (root / "images").mkdir(parents=True)
    for record in records:
        Image.new("RGB", (8, 8)).save(root / "images" / record["file_name"])
    file = root / "result.json"
    file.write_text(json.dumps(content))
    return file


def write_voc(root: Path) -> None:
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(parents=True)
    item = "<object><name>x</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object>"
    for i in range(NUM_IMAGES):
        Image.new("RGB", (8, 8)).save(root / "JPEGImages" / f"{i}.png")
        (root / "Annotations" / f"{i}.xml").write_text(
            f"<annotation><filename>{i}.png</filename>"
            f"<size><width>8</width><height>8</height></size>{item}</annotation>"
        )


def data_of(root, *, train=NOTHING, faulty="error"):
    return custom_data(
        root=root,
        train=train,
        val=NOTHING,
        apply_exif=True,
        faulty_annotations=faulty,
        faulty_images="error",
        batch_size=2,
        val_batch_size=None,
        num_workers=0,
        pad_to=1,
        train_transforms=EvalTransform(None, None),
        eval_transforms=EvalTransform(None, None),
        holdout=0.2,
    )


@pytest.fixture
def parsed(monkeypatch):
    """The sizes of the JSON texts that are parsed."""
    sizes = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: sizes.append(len(text)) or loads(text))
    return sizes


def ask_everything(data) -> None:
    """What tools/train.py asks."""
    assert (len(data.train_dataset()), len(data.val_dataset())) == (8, 2)
    assert len(data.val_ground_truth()["images"]) == 2
    assert set(data.fingerprints()) == {"train", "val"}
    assert data.class_table.names == ("x",)


def test_a_json_file_is_parsed_once(tmp_path, parsed):
    file = write_coco(tmp_path)
    ask_everything(data_of(tmp_path))
    assert parsed == [file.stat().st_size]


def test_a_json_file_that_is_named_is_parsed_once(tmp_path, parsed):
    train = {"annotations": str(write_coco(tmp_path)), "images": str(tmp_path / "images")}
    ask_everything(data_of(None, train=train))
    assert len(parsed) == 1


def test_evaluation_parses_it_once(tmp_path, parsed):
    write_coco(tmp_path)
    data = data_of(tmp_path)
    assert len(data.val_dataset()) == len(data.val_ground_truth()["images"]) == 2
    assert len(parsed) == 1


def test_other_formats_are_read_once(tmp_path, monkeypatch):
    write_voc(tmp_path)
    reads = []
    read_source = parts.read_source
    monkeypatch.setattr(
        parts, "read_source", lambda source, **options: reads.append(source) or read_source(source, **options)
    )
    ask_everything(data_of(tmp_path))
    assert len(reads) == 1


def test_both_parts_are_found_by_one_look(tmp_path, parsed):
    write_coco(tmp_path)
    found = find_parts(root=tmp_path, train=NOTHING, val=NOTHING, holdout=0.2)
    assert len(parsed) == 1
    assert {split: source.part.split for split, source in found.items()} == {"train": "train", "val": "val"}
    assert found["train"].content is found["val"].content


def test_the_ground_truth_alone_needs_no_images_and_training_after_it_does(tmp_path):
    file = write_coco(tmp_path)
    train = {"annotations": str(file), "images": None}
    find = partial(find_parts, root=None, train=train, val=NOTHING, holdout=0.2)
    whole = Parts(find, apply_exif=True, faulty="error")
    annotations, _ = whole.load("val", with_images=False)
    assert len(annotations.image_ids) == 2
    with pytest.raises(ValueError, match=r"Set data\.root"):
        whole.load("train", with_images=True)
    train["images"] = str(tmp_path / "images")
    annotations, images = whole.load("train", with_images=True)
    assert (len(annotations.image_ids), images) == (8, tmp_path / "images")


@pytest.mark.parametrize("faulty_split", ["train", "val"])
def test_faults_are_of_the_part_of_their_image(tmp_path, faulty_split, caplog):
    write_coco(tmp_path / "sound")
    data = data_of(tmp_path / "sound")
    sound = {"train": data.train_dataset(), "val": data.val_dataset()}[faulty_split]
    write_coco(tmp_path / "faulty", faulty_image=int(sound.annotations.image_ids[0]))
    data = data_of(tmp_path / "faulty")
    opens = {"train": data.train_dataset, "val": data.val_dataset}
    with pytest.raises(ValueError, match=r"has 1 fault\(s\) .*\n.*annotation 100"):
        opens.pop(faulty_split)()
    [open_other] = opens.values()
    assert len(open_other()) in (8, 2)
    ask_everything(data_of(tmp_path / "faulty", faulty="drop"))
    assert caplog.text.count("1 faulty entries dropped") == 1
