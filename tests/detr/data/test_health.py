"""Every kind of fault is found, named with its file and ids, and counted into the exit code."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from detr.data import SplitSource, check_split, exit_code, format_faults, format_summary


@pytest.fixture
def check(write_dataset):
    """Writes a dataset, changes its files, and checks it."""

    def check_content(content, change_images=lambda folder: None, encode=lambda text: text.encode(), **options):
        annotations, images = write_dataset(content)
        change_images(images)
        annotations.write_bytes(encode(annotations.read_text()))
        return check_split(SplitSource("coco", annotations, images), **options)

    return check_content


def kinds(report):
    return Counter(fault.kind for fault in report.faults)


def complete(content):
    """The content with everything that the format knows, so that nothing is left to find."""
    content |= {"info": {}, "licenses": []}
    for number, annotation in enumerate(content["annotations"], 1):
        annotation["id"] = number
        annotation.setdefault("iscrowd", 0)
        annotation.setdefault("area", 1)
    for category, new_id in zip(content["categories"], (3, 1, 2), strict=True):
        for annotation in content["annotations"]:
            if annotation["category_id"] == category["id"]:
                annotation["category_id"] = -new_id
        category["id"] = new_id
    for annotation in content["annotations"]:
        annotation["category_id"] = abs(annotation["category_id"])
    return content


def add_parent(content):
    content["categories"].append({"id": 4, "name": "pet"})
    content["categories"][0]["supercategory"] = "pet"


def box(content, *values, **keys):
    content["annotations"][0] |= {"bbox": list(values), **keys}


def test_a_sound_dataset_has_nothing_to_report(check, content):
    report = check(complete(content))
    assert report.faults == []
    assert report.exit_code == 0
    assert report.summary["images"] == 3
    assert report.summary["images_without_boxes"] == 1
    assert report.summary["boxes"] == 4
    assert report.summary["crowd_boxes"] == 1
    assert report.summary["max_boxes_an_image"] == 3
    assert report.summary["boxes_by_class"] == [["person", 2], ["plane", 1], ["zebra", 1]]
    assert "classes 3: person 2, plane 1, zebra 1" in format_summary(report.summary)
    assert json.loads(json.dumps(report.to_dict()))["exit_code"] == 0


@pytest.mark.parametrize(
    ("change", "kind", "severity", "words"),
    [
        # notes: training is not affected
        (lambda c: c.pop("info"), "no_info", "note", "no 'info'"),
        (lambda c: c.pop("licenses"), "no_licenses", "note", "no 'licenses'"),
        (lambda c: c["categories"].append({"id": 9, "name": "gnu"}), "category_id_gaps", "note", "from 1 to 9"),
        (lambda c: c["categories"].append({"id": 4, "name": "gnu"}), "category_unused", "note", "'gnu'"),
        (lambda c: add_parent(c), "category_unused_parent", "note", "'pet'"),
        (lambda c: c["categories"][0].update(name="person"), "category_name_twice", "note", "'person'"),
        (lambda c: c["categories"][0].update(name="zèbre"), "non_ascii_category", "note", "'zèbre'"),
        (lambda c: c["images"][0].update(file_name="é.png"), "non_ascii_file_name", "note", "'é.png'"),
        # dropped, guessed, repaired, missing, or over a limit
        (lambda c: c["categories"][0].update(id="3"), "category_id", "fault", "position 0: its id must be"),
        (lambda c: c["categories"].append({"id": 1, "name": "gnu"}), "category_id_twice", "fault", "category 1:"),
        (lambda c: c["categories"].append({"id": 4}), "category_name", "fault", "category 4:"),
        (lambda c: c["images"].append(c["images"][0] | {"id": "7"}), "image_id", "fault", "'7'"),
        (lambda c: c["images"].append(dict(c["images"][0])), "image_id_twice", "fault", "image 7:"),
        (lambda c: c["images"][2].update(height=24.5), "image_size", "fault", "image 12: height and width"),
        (lambda c: c["annotations"][0].update(id="x"), "annotation_id", "fault", "position 0: its id must be"),
        (lambda c: c["annotations"][0].update(id=2), "annotation_id_twice", "fault", "annotation 2: more than one"),
        (lambda c: c["annotations"][0].pop("id"), "annotation_id_missing", "fault", "position 0: no id"),
        (lambda c: c["annotations"][0].update(id=0), "annotation_id_zero", "fault", "annotation 0:"),
        (lambda c: c["annotations"][0].update(image_id=99), "image_id_unknown", "fault", "annotation 1: image_id 99"),
        (lambda c: c["annotations"][0].update(image_id="3"), "image_id", "fault", "annotation 1: image_id must be"),
        (lambda c: c["annotations"][0].update(category_id=8), "category_id_unknown", "fault", "annotation 1: category"),
        (lambda c: c["annotations"][0].update(category_id="2"), "category_id", "fault", "annotation 1: category_id"),
        (lambda c: c["annotations"][0].update(iscrowd=3), "iscrowd", "fault", "annotation 1: iscrowd"),
        (lambda c: c["annotations"][0].pop("iscrowd"), "iscrowd_missing", "fault", "annotation 1: no iscrowd"),
        (lambda c: c["annotations"][0].update(area="big"), "area", "fault", "annotation 1: area"),
        (lambda c: c["annotations"][0].pop("area"), "area_missing", "fault", "annotation 1: no area"),
        (lambda c: c["annotations"][0].pop("bbox"), "box", "fault", "annotation 1: bbox must be four numbers"),
        (lambda c: box(c), "box", "fault", r"got []"),
        (lambda c: box(c, "1", 2, 3, 4), "box", "fault", "'1'"),
        (lambda c: box(c, float("nan"), 0, 1, 1), "box_not_finite", "fault", "annotation 1: bbox must be finite"),
        (lambda c: box(c, 0, 0, float("inf"), 1), "box_not_finite", "fault", "annotation 1: bbox must be finite"),
        (lambda c: box(c, 10, 10, -5, 5), "box_negative", "fault", "annotation 1: bbox [10.0, 10.0, -5.0, 5.0] has"),
        (lambda c: box(c, 10, 10, 0, 5), "box_zero_size", "fault", "annotation 1:"),
        (lambda c: box(c, 100, 100, 5, 5), "box_outside", "fault", "annotation 1:"),
        (lambda c: box(c, 0, 0, 1e9, 5), "box_cut", "fault", "annotation 1:"),
        (lambda c: c["annotations"][0].update(iscrowd=1), "crowd_only", "fault", "image 3: all of its 1 boxes"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_in_an_annotation_file(check, content, change, kind, severity, words):
    complete(content)
    change(content)
    report = check(content)
    (found,) = [fault for fault in report.faults if fault.kind == kind]
    assert found.severity == severity
    assert words in found.problem
    assert found.action
    assert found.file.endswith("annotations.json")
    assert report.exit_code == {"note": 0, "fault": 1}[severity]
    assert f"{severity}: {kind} (1)" in format_faults(report.faults)
    if words.startswith("annotation 1:"):
        assert found.annotation_id == 1
    if words.startswith("image 3:"):
        assert found.image_id == 3
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["counts"][kind] == 1


def test_sizes_that_are_not_given_are_guessed_from_the_files_and_used(write_dataset, content):
    complete(content)
    box(content, 15, 2, 10, 20)
    annotations, images = write_dataset(content)
    for image in content["images"]:
        del image["width"], image["height"]
    annotations.write_text(json.dumps(content))
    report = check_split(SplitSource("coco", annotations, images))
    # image 3 is 20 pixels wide, which only its file says
    assert kinds(report) == {"size_missing": 3, "box_cut": 1}
    assert kinds(check_split(SplitSource("coco", annotations, images), with_images=False)) == {"size_missing": 3}


def test_more_boxes_than_queries(check, content):
    report = check(complete(content), num_queries=1)
    (found,) = report.faults
    assert (found.kind, found.image_id) == ("more_boxes_than_queries", 7)
    assert "2 boxes for 1 queries" in found.problem
    assert "model.num_queries" in found.action


def save(name, mode="RGB", size=(40, 30), **options):
    return lambda folder: Image.new(mode, size).save(folder / name, **options)


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def truncate(folder):
    path = folder / "a.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def save_16_bit(folder):
    Image.fromarray(np.zeros((30, 40), dtype=np.uint16)).save(folder / "a.png")


def save_animation(folder):
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    frames[0].save(folder / "a.png", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda folder: (folder / "a.png").unlink(), "image_missing", "image 7 is not there"),
        (truncate, "image_unreadable", "image 7: cannot read the image"),
        (lambda folder: (folder / "a.png").write_bytes(b"no image"), "image_unreadable", "image 7: cannot read"),
        (save("a.png", size=(10, 10)), "image_size", "10 x 10 pixels"),
        (save("a.png", size=(30, 40)), "image_size", "width and height are swapped"),
        (save("a.png", size=(30, 40), exif=exif(6)), "exif_orientation", "EXIF orientation 6"),
        (save("a.png", exif=exif(6)), "image_size", "width and height are swapped"),
        (save("a.png", exif=exif(3)), "exif_orientation", "EXIF orientation 3"),
        (save_16_bit, "16_bit", "16-bit"),
        (save("a.png", mode="RGBA"), "alpha", "alpha"),
        (save("a.png", mode="LA"), "alpha", "alpha"),
        (save_animation, "animation", "2 frames"),
        (lambda folder: Image.new("CMYK", (40, 30)).save(folder / "a.png", format="JPEG"), "cmyk", "CMYK"),
    ],
)  # fmt: skip
def test_each_kind_of_fault_in_an_image(check, content, change, kind, words):
    report = check(complete(content), change)
    (found,) = report.faults
    assert (found.kind, found.severity, found.image_id) == (kind, "fault", 7)
    assert found.file.endswith("a.png")
    assert words in found.problem
    assert report.exit_code == 1


def test_gray_and_palette_images_are_nothing_to_report(check, content):
    def change(folder):
        Image.new("L", (40, 30)).save(folder / "a.png")
        Image.new("P", (20, 50)).save(folder / "sub/b.png")

    assert check(complete(content), change).faults == []


@pytest.mark.parametrize(
    ("encode", "exit_code", "words"),
    [
        (lambda text: b"\xef\xbb\xbf" + text.encode(), 1, "byte order mark"),
        (lambda text: text.replace("zebra", "z\xe8bre").encode("latin-1"), 2, "is not UTF-8"),
        (lambda text: text.encode("utf-16"), 2, "is not UTF-8"),
        (lambda text: text[:-20].encode(), 2, "is not valid JSON"),
        (lambda text: b"[" * 100_000, 2, "nested too deeply"),
        (lambda text: b"", 2, "is not valid JSON"),
        (lambda text: b"[1]", 2, "holds a list"),
        (lambda text: text.replace('"categories"', '"kinds"').encode(), 2, "'categories'; found nothing"),
        (lambda text: text.replace("a.png", "../a.png").encode(), 2, "outside the image folder"),
        (lambda text: text.replace("a.png", "/etc/passwd").encode(), 2, "outside the image folder"),
    ],
)
def test_files_that_cannot_be_used_and_marks_that_can(check, content, encode, exit_code, words):
    report = check(complete(content), encode=lambda text: encode(json.dumps(json.loads(text), ensure_ascii=False)))
    assert report.exit_code == exit_code
    assert words in report.faults[-1].problem


def test_a_missing_file_and_a_missing_folder_are_fatal(write_dataset, content):
    annotations, images = write_dataset(content)
    assert check_split(SplitSource("coco", annotations.with_name("no.json"), images)).exit_code == 2
    shutil.rmtree(images)
    report = check_split(SplitSource("coco", annotations, images))
    assert report.exit_code == 2
    assert "no image folder" in report.faults[-1].problem


def test_long_lists_are_cut_for_people_and_whole_for_machines(check, content):
    complete(content)
    content["annotations"] = [
        {"id": i, "image_id": 7, "category_id": 1, "bbox": [0, 0, 0, 1], "area": 0, "iscrowd": 0} for i in range(1, 26)
    ]
    report = check(content)
    text = format_faults(report.faults)
    assert "fault: box_zero_size (25)" in text
    assert "annotation 10:" in text
    assert "annotation 11:" not in text
    assert "... and 15 more" in text
    assert len([fault for fault in report.to_dict()["faults"] if fault["kind"] == "box_zero_size"]) == 25


def test_the_worst_finding_decides_the_exit_code(check, content):
    report = check(complete(content), save("a.png", mode="RGBA"))
    assert exit_code([]) == 0
    assert exit_code(report.faults) == 1
