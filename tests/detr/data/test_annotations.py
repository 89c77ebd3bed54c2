import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from detr.data import load_coco_annotations
from detr.data.annotations import PackedStrings


@pytest.fixture
def load(tmp_path):
    def load_content(content, **options):
        path = tmp_path / "annotations.json"
        path.write_text(json.dumps(content))
        return load_coco_annotations(path, **options)

    return load_content


def test_boxes_are_grouped_by_image_in_file_order(load, content):
    annotations = load(content)
    assert annotations.image_ids.tolist() == [7, 3, 12]
    assert annotations.first_box.tolist() == [0, 3, 4, 4]
    assert annotations.annotation_ids.tolist() == [0, 4, 5, 11]
    assert annotations.boxes[2].tolist() == [20.5, 10.25, 6, 7]
    assert annotations.image_sizes.tolist() == [[30, 40], [50, 20], [24, 24]]
    assert [annotations.file_names[i] for i in range(3)] == ["a.png", "sub/b.png", "empty.png"]


def test_the_boxes_of_an_image_keep_their_order(load, content):
    content["annotations"] = [
        {"id": i, "image_id": (7, 3, 12)[i % 3], "category_id": 1, "bbox": [i, 0, 1, 1]} for i in range(300)
    ]
    assert load(content).annotation_ids.tolist() == [i for first in range(3) for i in range(first, 300, 3)]


def test_missing_iscrowd_is_0_and_missing_area_is_the_boxs(load, content):
    annotations = load(content)
    assert annotations.crowd.tolist() == [False, True, False, False]
    assert annotations.areas.tolist() == [80, 900, 42, 150.5]


def test_contiguous_labels_follow_ascending_category_ids(load, content):
    table = load(content).class_table("contiguous")
    assert table.names == ("person", "plane", "zebra")
    assert table.category_ids == (1, 5, 90)


def test_category_id_labels_have_a_row_for_every_id(load, content):
    table = load(content).class_table("category_id")
    assert table.num_classes == 91
    assert table.names[90] == "zebra"
    assert table.names[5] == "plane"
    assert sum(name == "" for name in table.names) == 88
    assert table.category_ids == tuple(range(91))


def test_category_ids_from_0_keep_their_row(load, content):
    content["categories"][1]["id"] = 0
    for annotation in content["annotations"]:
        annotation["category_id"] = {1: 0}.get(annotation["category_id"], annotation["category_id"])
    annotations = load(content)
    assert annotations.class_table("contiguous").category_ids == (0, 5, 90)
    assert annotations.class_table("category_id").names[0] == "person"


@pytest.mark.parametrize("category_id", [-1, 123456789])
def test_category_id_labels_refuse_ids_that_make_no_head(load, content, category_id):
    content["categories"].append({"id": category_id, "name": "odd"})
    annotations = load(content)
    with pytest.raises(ValueError, match=f"{category_id}.*label_map='contiguous'"):
        annotations.class_table("category_id")
    assert annotations.class_table("contiguous").num_classes == 4


def test_an_unknown_label_map_is_refused(load, content):
    with pytest.raises(ValueError, match="'contiguous' or 'category_id'; got 'coco80'"):
        load(content).class_table("coco80")


def test_ground_truth_numbers_annotations_from_1_and_fills_what_is_missing(load, content):
    truth = load(content).ground_truth()
    assert [annotation["id"] for annotation in truth["annotations"]] == [1, 2, 3, 4]
    assert truth["info"] == {}
    assert truth["licenses"] == []
    assert truth["annotations"][1]["iscrowd"] == 1
    assert truth["annotations"][2] == {
        "id": 3,
        "image_id": 7,
        "category_id": 1,
        "bbox": [20.5, 10.25, 6, 7],
        "area": 42,
        "iscrowd": 0,
    }
    assert truth["images"][1] == {"id": 3, "file_name": "sub/b.png", "height": 50, "width": 20}
    assert json.loads(json.dumps(truth)) == truth


def test_ground_truth_is_what_pycocotools_computes_with(load, content):
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = load(content).ground_truth()
    coco.createIndex()
    assert coco.getCatIds(catNms=["zebra"]) == [90]
    assert len(coco.getAnnIds(imgIds=[7], iscrowd=False)) == 2
    assert len(coco.loadRes([{"image_id": 7, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 1}]).anns) == 1


def float_ids(content):
    """The content as pandas writes it: every id as a float."""
    for records in content.values():
        for record in records:
            record |= {key: float(record[key]) for key in ("id", "image_id", "category_id") if key in record}


def test_whole_ids_that_are_floats_are_integers(load, content):
    expected = load(content).ground_truth()
    float_ids(content)
    assert '"category_id": 5.0' in json.dumps(content)
    found = load(content)
    # 7 == 7.0, but not as text
    assert json.dumps(found.ground_truth()) == json.dumps(expected)
    assert found.annotation_ids.tolist() == [0, 4, 5, 11]
    assert all(type(category_id) is int for category_id in found.category_ids)


@pytest.mark.parametrize("value", [7.5, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize(
    ("records", "key"),
    [("images", "id"), ("categories", "id"), ("annotations", "id"), ("annotations", "image_id"),
     ("annotations", "category_id")],
)  # fmt: skip
def test_other_floats_are_no_ids(load, content, records, key, value):
    content[records][0][key] = value
    with pytest.raises(ValueError, match=f"{key} must be an integer; got {re.escape(repr(value))}"):
        load(content)


def test_the_float_of_an_id_is_that_id_twice(load, content):
    content["annotations"][0]["id"] = 4.0
    with pytest.raises(ValueError, match="annotation 4: more than one has this id"):
        load(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][0].update(bbox=["1", "2", "3", "4"]), r"annotation 11: bbox must be four num.*'1'"),
        (lambda c: c["annotations"][0].update(bbox=[]), r"annotation 11: bbox must be four numbers.*got \[\]"),
        (lambda c: c["annotations"][0].pop("bbox"), r"annotation 11: bbox must be four numbers.*got None"),
        (lambda c: c["annotations"][0].update(bbox=[float("nan"), 0, 1, 1]), r"annotation 11: bbox must be finite"),
        (lambda c: c["annotations"][0].update(bbox=[0, 0, float("inf"), 1]), r"annotation 11: bbox must be finite"),
        (lambda c: c["annotations"][0].update(bbox=[True, 0, 1, 1]), r"annotation 11: bbox must be four numbers"),
        (lambda c: c["annotations"][0].update(category_id=8), r"annotation 11: category_id 8 is unknown.*\[1, 5, 90\]"),
        (lambda c: c["annotations"][0].update(category_id="5"), r"annotation 11: category_id must be an integer.*'5'"),
        (lambda c: c["annotations"][0].update(image_id=99), r"annotation 11: image_id 99 is unknown"),
        (lambda c: c["annotations"][0].update(id="11"), r"annotation at position 0: its id must be an integer.*'11'"),
        (lambda c: c["annotations"][0].update(id=4), r"annotation 4: more than one has this id"),
        (lambda c: c["annotations"][0].update(area="big"), r"annotation 11: area must be a finite number"),
        (lambda c: c["annotations"][0].update(iscrowd=2), r"annotation 11: iscrowd must be 0 or 1; got 2"),
        (lambda c: c["images"][0].update(id="7"), r"image at position 0: its id must be an integer; got '7'"),
        (lambda c: c["images"][0].update(id=3), r"image 3: more than one has this id"),
        (lambda c: c["images"][0].update(height=0), r"image 7: height and width must be whole numbers"),
        (lambda c: c["images"][0].pop("height"), r"image 7: height and width must be whole numbers"),
        (lambda c: c["images"][0].pop("file_name"), r"image 7: 'file_name' must be a text; got None"),
        (lambda c: c["images"][0].update(file_name="\ud800.jpg"), r"image 7: 'file_name' is not valid Unicode"),
        (lambda c: c["categories"][0].update(id=1), r"category 1: more than one has this id"),
        (lambda c: c["categories"][0].pop("name"), r"category 90: 'name' must be a text"),
        (lambda c: c.update(categories=[]), r"lists no categories"),
        (lambda c: c.update(images=[]), r"lists no images: the dataset is empty"),
        (lambda c: c.pop("annotations"), r"needs a list of dicts named 'annotations'; found nothing"),
        (lambda c: c.update(images={"id": 1}), r"needs a list of dicts named 'images'; found a dict"),
    ],
)
def test_a_faulty_entry_is_named(load, content, change, message):
    change(content)
    with pytest.raises(ValueError, match=message):
        load(content)


def test_all_faults_come_in_one_message_that_lists_the_first_ten(load, content):
    content["annotations"] = [{"id": i, "image_id": 7, "category_id": 4, "bbox": [0, 0, 1, 1]} for i in range(1, 26)]
    with pytest.raises(ValueError, match=r"has 25 fault\(s\)") as error:
        load(content)
    listed = re.findall(r"annotation (\d+):", str(error.value))
    assert listed == [str(i) for i in range(1, 11)]
    assert "and 15 more" in str(error.value)


def test_annotations_without_ids_are_fine(load, content):
    for annotation in content["annotations"]:
        del annotation["id"]
    assert [a["id"] for a in load(content).ground_truth()["annotations"]] == [1, 2, 3, 4]


def test_a_file_of_test_images_needs_no_annotations_for_evaluation(load, content):
    del content["annotations"]
    annotations = load(content, need_annotations=False)
    assert annotations.first_box.tolist() == [0, 0, 0, 0]
    assert annotations.ground_truth()["annotations"] == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no annotation file {tmp_path}/absent.json"):
        load_coco_annotations(tmp_path / "absent.json")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_names_in_any_script_survive_with_and_without_a_byte_order_mark(tmp_path, content, encoding):
    content["categories"][0]["name"] = "зебра 斑马"
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(content, ensure_ascii=False).encode(encoding))
    assert load_coco_annotations(path).category_names[2] == "зебра 斑马"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"images": "caf\xe9"}'.encode("latin-1"), r"is not UTF-8: byte 15 is 0xe9"),
        (json.dumps({"images": []}).encode("utf-16"), r"is not UTF-8: byte 0 is 0xff"),
        (b'{"images": [', r"is not valid JSON .*Is the file complete"),
        (b"[]", r"must hold a COCO dict .*holds a list"),
        (b"", r"is not valid JSON"),
    ],
)
def test_what_is_no_utf8_json_dict_is_refused(tmp_path, raw, message):
    path = tmp_path / "a.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        load_coco_annotations(path)


def test_packed_strings_give_back_what_was_put_in():
    strings = ["a", "", "写真 (1) #&%.jpg", "b/c.png"]
    packed = PackedStrings(strings)
    assert [packed[i] for i in range(len(packed))] == strings
    with pytest.raises(IndexError):
        packed[4]
    assert len(PackedStrings([])) == 0


# file -> None: loads; a text: part of the error
SHARED_ANNOTATIONS = {
    "datumaro/image_info_train.json": "lists no categories",
    "datumaro/instances_train.json": None,
    "datumaro/instances_val.json": None,
    "datumaro/kaggle_relaxed.json": None,
    "datumaro/labels_val.json": "annotation 1: bbox must be four numbers",
    "datumaro/panoptic_val.json": "annotation at position 0: category_id must be an integer; got None",
    "datumaro/roboflow_val.json": None,
    "derived/bbox_empty.json": "annotation 22328: bbox must be four numbers",
    "derived/bbox_negative_size.json": None,
    "derived/bbox_strings.json": r"bbox must be four numbers \[x, y, w, h\]; got \['102.49'",
    "derived/clean.json": None,
    "derived/missing_image_file.json": None,
    "derived/no_info_no_licenses.json": None,
    "derived/no_iscrowd_no_area_no_segmentation.json": None,
    "derived/no_width_height.json": None,
    "derived/truncated_json.json": "is not valid JSON",
    "derived/unicode_names.json": None,
    "derived/unknown_category_id.json": "category_id 12345 is unknown",
    "fce_crowdpose_no_area.json": None,
    "fce_string_image_ids.json": "image at position 0: its id must be an integer; got '2299'",
    "hotcoco_healthcheck_quality.json": None,
    "hotcoco_zero_ids.json": None,
}


@pytest.mark.parametrize("name", SHARED_ANNOTATIONS)
def test_shared_annotation_files_load_or_say_why_not(shared_dir, name):
    path = shared_dir / "data/odd-images/annotations" / name
    if message := SHARED_ANNOTATIONS[name]:
        with pytest.raises(ValueError, match=message):
            load_coco_annotations(path)
        return
    annotations = load_coco_annotations(path)
    with (path.parents[path.parts[::-1].index("annotations") - 1] / "report.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["file"] == name)
    assert len(annotations.image_ids) == int(row["images"])
    assert len(annotations.boxes) == int(row["annotations"])
    assert len(annotations.category_ids) == int(row["categories"])


def test_the_table_of_shared_files_is_complete(shared_dir):
    folder = shared_dir / "data/odd-images/annotations"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.json")} == set(SHARED_ANNOTATIONS)


@pytest.mark.parametrize(
    "name", ["coco-mini/annotations/instances_val2017.json", "bccd/annotations/instances_val.json"]
)
def test_ground_truth_of_real_files_equals_the_file(shared_dir, name):
    path: Path = shared_dir / f"data/{name}"
    raw = json.loads(path.read_text())
    truth = load_coco_annotations(path).ground_truth()

    def key(annotation):
        return (
            annotation["image_id"],
            annotation["category_id"],
            tuple(map(float, annotation["bbox"])),
            float(annotation["area"]),
            annotation["iscrowd"],
        )

    assert sorted(map(key, truth["annotations"])) == sorted(map(key, raw["annotations"]))
    assert [image["id"] for image in truth["images"]] == [image["id"] for image in raw["images"]]
    assert np.unique([annotation["id"] for annotation in truth["annotations"]]).size == len(raw["annotations"])
