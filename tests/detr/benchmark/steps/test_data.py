"""Where a measured step's batches come from."""

import json
from itertools import islice

import pytest
import torch
from PIL import Image

from detr.benchmark.steps.data import cached_batches, check_source, jpeg_sizes, loader_batches, write_jpeg_dataset
from detr.data import EvalTransform, coco_data, detr_augmentation


def make_data(root, *, batch_size=2, num_workers=0, pad_to=1):
    return coco_data(
        root=root,
        train={"annotations": None, "images": None},
        val={"annotations": None, "images": None},
        label_map="contiguous",
        apply_exif=True,
        batch_size=batch_size,
        val_batch_size=None,
        num_workers=num_workers,
        pad_to=pad_to,
        train_transforms=detr_augmentation([48, 64], 96, [56, 64], (32, 48)),
        eval_transforms=EvalTransform(64, 96),
    )


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "jpegs"
    write_jpeg_dataset(folder, [(96, 128)] * 5)
    return folder


def test_the_jpeg_dataset(jpegs):
    files = sorted((jpegs / "train").iterdir())
    assert len(files) == 5
    with Image.open(files[0]) as image:
        assert (image.format, image.size) == ("JPEG", (128, 96))
    annotations = json.loads((jpegs / "annotations" / "instances_train.json").read_text())
    assert {image["file_name"] for image in annotations["images"]} == {file.name for file in files}
    assert annotations["annotations"]
    before = files[0].stat().st_mtime_ns
    write_jpeg_dataset(jpegs, [(96, 128)] * 5)
    assert files[0].stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="holds something else than 6 JPEG images, the first of 96 x 128 pixels"):
        write_jpeg_dataset(jpegs, [(96, 128)] * 6)


def test_jpeg_sizes():
    assert jpeg_sizes([96, 128], 2) == [(96, 128)] * 2
    assert len(set(jpeg_sizes("coco", 50))) > 5
    for wrong in ("voc", [96]):
        with pytest.raises(ValueError, match="jpeg_size must be"):
            jpeg_sizes(wrong, 2)


def test_jpegs_of_several_sizes(tmp_path):
    write_jpeg_dataset(tmp_path, [(96, 128), (128, 100)])
    sizes = []
    for file in sorted((tmp_path / "train").iterdir()):
        with Image.open(file) as image:
            sizes.append(image.size)
    assert sizes == [(128, 96), (100, 128)]


def test_cached_images_are_those_of_the_first_epoch(jpegs):
    data = make_data(jpegs, pad_to=32)
    cached = list(islice(cached_batches(data, seed=3).batches, 4))
    loaded = list(data.train_loader(seed=3))
    assert len(loaded) == 2
    # two full batches, then the same again
    for batch, expected in zip(cached, loaded * 2, strict=True):
        assert torch.equal(batch.images.pixels, expected.images.pixels)
        assert batch.images.pixels.shape[2] % 32 == 0
        for target, other in zip(batch.targets, expected.targets, strict=True):
            assert torch.equal(target.boxes, other.boxes)
    with pytest.raises(ValueError, match="takes 6 images"):
        cached_batches(make_data(jpegs, batch_size=6), seed=3)


def test_a_small_set_makes_one_long_epoch(jpegs):
    data = make_data(jpegs, num_workers=1)
    supply = loader_batches(data, num_batches=7, seed=3, pin_memory=False)
    assert supply.num_ahead == 2
    assert len(data.train_dataset()) >= (7 + 2) * 2
    batches = list(islice(supply.batches, 9))
    assert {target.image_id for batch in batches for target in batch.targets} == {1, 2, 3, 4, 5}
    # augmentation is drawn anew each time a file comes
    assert len({batch.images.pixels.shape for batch in batches}) > 2


def test_sources():
    assert check_source("cached") == "cached"
    with pytest.raises(ValueError, match="one of synthetic, cached, loader; got disk"):
        check_source("disk")
