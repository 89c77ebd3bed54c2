import pytest
from PIL import Image

from detr.data import check_split, find_split
from detr.data.sources import load_source

OBJECT = "<object><name>{}</name><difficult>{}</difficult><bndbox>{}</bndbox></object>"


def corners(xmin, ymin, xmax, ymax):
    return f"<xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"


def xml(*objects, size="<size><width>40</width><height>20</height><depth>3</depth></size>"):
    return f"<annotation><filename>other.jpg</filename>{size}{''.join(objects)}</annotation>"


@pytest.fixture
def root(tmp_path):
    """Two splits of one image each, with different classes."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    for split, name in (("train", "a"), ("val", "b")):
        Image.new("RGB", (40, 20)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
        (tmp_path / "ImageSets/Main" / f"{split}.txt").write_text(f"{name}\n")
    write(tmp_path, "a", xml(OBJECT.format("dog", 0, corners(1, 1, 40, 20))))
    write(tmp_path, "b", xml(OBJECT.format("cat", 1, corners(11, 6, 20, 15))))
    return tmp_path


def write(root, name, text):
    (root / "Annotations" / f"{name}.xml").write_text(text)


def source_of(root, split):
    return find_split(split, root=root, annotations=None, images=None)


def load(root, split, faulty="error"):
    other = source_of(root, "val" if split == "train" else "train")
    return load_source(source_of(root, split), other=other, need_annotations=True, apply_exif=True, faulty=faulty)


def test_corners_count_from_1_and_include_both_ends(root):
    assert load(root, "train").boxes.tolist() == [[0, 0, 40, 20]]
    val = load(root, "val")
    assert val.boxes.tolist() == [[10, 5, 10, 10]]
    assert val.areas.tolist() == [100]
    # difficult objects are objects like the others
    assert val.crowd.tolist() == [False]


def test_corners_at_0_are_the_edge(root):
    write(root, "a", xml(OBJECT.format("dog", 0, corners(0, 0, 39, 19))))
    assert load(root, "train").boxes.tolist() == [[0, 0, 39, 19]]
    assert check_split(source_of(root, "train")).exit_code == 0


def test_the_classes_are_those_of_both_splits(root):
    tables = [load(root, split).class_table("contiguous") for split in ("train", "val")]
    assert tables[0] == tables[1]
    assert tables[0].names == ("cat", "dog")
    assert tables[0].category_ids == (1, 2)


def test_the_image_is_the_one_of_the_files_name(root):
    assert load(root, "train").file_names[0] == "a.jpg"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (xml(OBJECT.format("dog", 0, corners("x", 1, 4, 4))), "box", "a.xml object 1: bbox must be four numbers"),
        (xml("<object><name>dog</name></object>"), "box", "a.xml object 1: bbox must be four numbers"),
        (xml(OBJECT.format("", 0, corners(1, 1, 4, 4))), "category_id", "a.xml object 1: category_id must be"),
        (xml(OBJECT.format("dog", 0, corners("nan", 1, 4, 4))), "box_not_finite", "a.xml object 1: bbox must be fi"),
    ],
)
def test_faulty_objects_are_named(root, text, kind, words):
    good = OBJECT.format("dog", 0, corners(1, 1, 4, 4))
    write(root, "a", text.replace("</annotation>", f"{good}</annotation>"))
    with pytest.raises(ValueError, match=words):
        load(root, "train")
    assert len(load(root, "train", faulty="drop").boxes) == 1
    report = check_split(source_of(root, "train"))
    assert kind in {fault.kind for fault in report.faults}
    assert report.exit_code == 1


@pytest.mark.parametrize("break_file", [lambda path: path.write_text("<annotation>"), lambda path: path.unlink()])
def test_unreadable_and_missing_files_are_named(root, break_file):
    (root / "ImageSets/Main/train.txt").write_text("a\nc\n")
    Image.new("RGB", (40, 20)).save(root / "JPEGImages/c.jpg")
    write(root, "c", xml())
    break_file(root / "Annotations/c.xml")
    with pytest.raises(ValueError, match=r"c\.xml.* is not valid XML"):
        load(root, "train")
    assert len(load(root, "train", faulty="drop").image_ids) == 1
    report = check_split(source_of(root, "train"))
    assert [(fault.kind, fault.severity) for fault in report.faults] == [("xml_unreadable", "fault")]


def test_a_size_of_0_is_named_and_read_from_the_image(root):
    write(
        root,
        "a",
        xml(OBJECT.format("dog", 0, corners(1, 1, 4, 4)), size="<size><width>0</width><height>0</height></size>"),
    )
    report = check_split(source_of(root, "train"))
    assert [fault.kind for fault in report.faults] == ["image_size"]
    write(root, "a", xml(OBJECT.format("dog", 0, corners(1, 1, 4, 4)), size=""))
    assert load(root, "train").image_sizes.tolist() == [[-1, -1]]


def test_an_image_that_is_not_there_is_missing(root):
    (root / "JPEGImages/a.jpg").unlink()
    report = check_split(source_of(root, "train"))
    assert [fault.kind for fault in report.faults] == ["image_missing"]
