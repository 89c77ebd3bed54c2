import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr.data import CocoDataset, EvalTransform, build_train_loader, detr_augmentation, read_image
from detr.data.image_cache import ImageCache

KEEP_SIZE = EvalTransform(None, None)


def test_what_is_kept_is_what_was_decoded(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif)
    cache = ImageCache(tmp_path / "cache")
    for apply_exif in (True, False):
        expected = read_image(tmp_path / "a.jpg", apply_exif=apply_exif)
        assert torch.equal(cache.read(tmp_path / "a.jpg", apply_exif=apply_exif), expected)
        with monkeypatch.context() as patch:
            patch.setattr("detr.data.image_cache.read_image", lambda *args, **options: pytest.fail("decoded"))
            again = cache.read(tmp_path / "a.jpg", apply_exif=apply_exif)
        assert torch.equal(again, expected)
        assert again.stride(0) == 1
        # written to by a transform, it stays whole for the next one
        again[:] = 0
        assert torch.equal(cache.read(tmp_path / "a.jpg", apply_exif=apply_exif), expected)


def test_a_changed_image_is_decoded_anew(tmp_path):
    cache = ImageCache(tmp_path / "cache")
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4), "red").save(path)
    cache.read(path, apply_exif=True)
    Image.new("RGB", (4, 4), "blue").save(path)
    os.utime(path, ns=(1, 1))
    assert cache.read(path, apply_exif=True)[:, 0, 0].tolist() == [0, 0, 255]


def test_faulty_images_are_named_and_not_kept(tmp_path):
    cache = ImageCache(tmp_path / "cache")
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read the image .*a\.png"):
        cache.read(tmp_path / "a.png", apply_exif=True)
    with pytest.raises(FileNotFoundError, match="no image file"):
        cache.read(tmp_path / "b.png", apply_exif=True)
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=r"data.cache_dir=.*No space left.*data.cache_dir=null"):
        ImageCache(tmp_path / "cache").read(tmp_path / "a.png", apply_exif=True)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_dataset_gives_the_same_batches_with_and_without_it(write_dataset, content, tmp_path: Path):
    annotations, images = write_dataset(content)

    def batches(cache_dir, num_workers=0):
        transforms = detr_augmentation([30, 40], 80, (30, 40), (20, 30))
        dataset = CocoDataset(annotations, images, transforms, training=True, cache_dir=cache_dir)
        loader = build_train_loader(dataset, batch_size=1, num_workers=num_workers, pad_to=1, seed=0)
        return [batch.images.pixels for batch in loader]

    expected = batches(None)
    for num_workers in (2, 0):
        found = batches(tmp_path / "cache", num_workers)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 3


def test_a_wrong_size_is_found_in_the_cache_too(write_dataset, content, tmp_path: Path):
    annotations, images = write_dataset(content)
    Image.new("RGB", (9, 9)).save(images / "a.png")
    dataset = CocoDataset(annotations, images, KEEP_SIZE, training=True, cache_dir=tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(ValueError, match="is 9 x 9 pixels"):
            dataset[0]
