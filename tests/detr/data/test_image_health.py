"""Images to evaluate on are checked by their headers before anything trains."""

import re

import pytest
from PIL import Image

from detr.data import CocoDataset, EvalTransform, image_health

KEEP_SIZE = EvalTransform(None, None)


def broken(path):
    path.write_bytes(b"no image")


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:12])


def empty(path):
    path.write_bytes(b"")


def of_another_size(path):
    Image.new("RGB", (41, 30)).save(path)


def swapped_by_exif(path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 30)).save(path, exif=exif)


FAULTS = {
    broken: "cannot read the image",
    cut_in_the_header: "cannot read the image",
    empty: "cannot read the image",
    of_another_size: "41 x 30 pixels .* annotations say 40 x 30",
    swapped_by_exif: "width and height are swapped.*data.apply_exif=false",
}


@pytest.fixture
def decoded(monkeypatch):
    """The names of the images that are decoded."""
    names = []
    load_checked = image_health.load_checked

    def load(path, *args, **options):
        names.append(path.name)
        return load_checked(path, *args, **options)

    monkeypatch.setattr(image_health, "load_checked", load)
    return names


@pytest.mark.parametrize("damage", FAULTS)
def test_a_faulty_header_is_met_when_images_to_evaluate_on_are_opened(write_dataset, content, decoded, damage):
    annotations, images = write_dataset(content)
    damage(images / "a.png")
    with pytest.raises(ValueError, match=rf"(?s)1 of the 3 images of .*image 7.*{FAULTS[damage]}") as error:
        CocoDataset(annotations, images, KEEP_SIZE, training=False)
    assert "data.faulty_images=skip" in str(error.value)
    assert decoded == ["a.png"]
    # training says so where it meets the image, in its first epoch
    dataset = CocoDataset(annotations, images, KEEP_SIZE, training=True)
    with pytest.raises(ValueError, match="image 7"):
        dataset[0]
    assert len(CocoDataset(annotations, images, KEEP_SIZE, training=False, faulty_images="skip")) == 2


def test_the_first_ten_are_listed(write_dataset, content):
    content["images"] += [{"id": 100 + i, "file_name": f"{i}.png", "width": 20, "height": 10} for i in range(15)]
    annotations, images = write_dataset(content)
    for number in range(15):
        broken(images / f"{number}.png")
    with pytest.raises(ValueError, match=r"^15 of the 18 images .* cannot be evaluated on; the first") as error:
        CocoDataset(annotations, images, KEEP_SIZE, training=False)
    assert re.findall(r"image (\d+):", str(error.value)) == [str(100 + i) for i in range(10)]
    assert "and 5 more" in str(error.value)


def test_images_that_are_all_of_another_size_are_not_all_decoded(write_dataset, content, decoded):
    content["images"] += [{"id": 100 + i, "file_name": f"{i}.png", "width": 20, "height": 10} for i in range(60)]
    annotations, images = write_dataset(content)
    for number in range(60):
        Image.new("RGB", (10, 5)).save(images / f"{number}.png")
    with pytest.raises(ValueError, match=r"^at least 20 of the 63 images .*headers 60 are.* first 20 were decoded"):
        CocoDataset(annotations, images, KEEP_SIZE, training=False)
    assert sorted(decoded) == sorted(f"{number}.png" for number in range(20))


def test_suspects_that_are_sound_do_not_hide_faults_behind_them(write_dataset, content, decoded, monkeypatch):
    content["images"] += [{"id": 100 + i, "file_name": f"{i}.png", "width": 20, "height": 10} for i in range(60)]
    annotations, images = write_dataset(content)
    broken(images / "59.png")
    monkeypatch.setattr(image_health, "read_image_size", lambda path, *, apply_exif: (1, 1))
    with pytest.raises(ValueError, match=r"^1 of the 63 images .* cannot be evaluated on; the first:\n  image 159"):
        CocoDataset(annotations, images, KEEP_SIZE, training=False)
    assert len(decoded) == 63


def test_sound_images_are_not_decoded(write_dataset, content, decoded):
    annotations, images = write_dataset(content)
    # turned upright, it has the size that its annotations give
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 40)).save(images / "a.png", exif=exif)
    assert len(CocoDataset(annotations, images, KEEP_SIZE, training=False)) == 3
    assert decoded == []


@pytest.mark.parametrize("training", [False, True])
def test_an_image_that_is_cut_after_its_header_is_met_when_it_is_decoded(write_dataset, content, training):
    annotations, images = write_dataset(content)
    path = images / "a.png"
    path.write_bytes(path.read_bytes()[:200])
    dataset = CocoDataset(annotations, images, KEEP_SIZE, training=training)
    with pytest.raises(ValueError, match="cannot read the image"):
        dataset[0]


def test_the_verdict_on_a_suspect_header_is_that_of_decoding(write_dataset, content, decoded, monkeypatch):
    annotations, images = write_dataset(content)

    def read_image_size(path, *, apply_exif):
        if path.name == "a.png":
            raise ValueError("an EXIF block that Pillow does not read")
        return (1, 1) if path.name == "b.png" else (24, 24)

    monkeypatch.setattr(image_health, "read_image_size", read_image_size)
    assert len(CocoDataset(annotations, images, KEEP_SIZE, training=False)) == 3
    assert sorted(decoded) == ["a.png", "b.png"]
