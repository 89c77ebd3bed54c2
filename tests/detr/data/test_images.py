import csv

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from detr.data import read_image, read_image_size
from detr.data.images import _num_jpeg_pixels

ORIENTATION_TAG = 0x0112
# what each EXIF orientation makes of the pixels (h, w, 3) of the file
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (20, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.ppm"])
def test_lossless_files_come_back_bit_for_bit(tmp_path, pixels, name):
    Image.fromarray(pixels).save(tmp_path / name)
    image = read_image(tmp_path / name)
    assert image.shape == (3, 20, 50)
    assert image.dtype == torch.uint8
    assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)


def test_jpegs_equal_pillows(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=90)
    expected = np.asarray(Image.open(tmp_path / "a.jpg"))
    assert np.array_equal(read_image(tmp_path / "a.jpg").permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_exif_orientation_is_applied_unless_told_not_to(tmp_path, pixels, orientation, name):
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    stored = np.asarray(Image.open(tmp_path / name))
    upright = UPRIGHT[orientation](stored)
    image = read_image(tmp_path / name)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), upright)
    assert read_image_size(tmp_path / name) == upright.shape[:2]
    assert np.array_equal(read_image(tmp_path / name, apply_exif=False).permute(1, 2, 0).numpy(), stored)
    assert read_image_size(tmp_path / name, apply_exif=False) == (20, 50)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.tif", "a.webp", "a.gif"])
def test_a_size_is_read_without_the_pixels(tmp_path, pixels, monkeypatch, name):
    Image.fromarray(pixels).save(tmp_path / name)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    assert read_image_size(tmp_path / name) == (20, 50)


@pytest.mark.parametrize("late", [True, False])
def test_the_orientation_of_a_png_counts_wherever_it_stands(tmp_path, pixels, late):
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path, exif=exif)
    if late:
        content = path.read_bytes()
        start = content.index(b"eXIf") - 4
        end = start + 12 + int.from_bytes(content[start : start + 4], "big")
        pixels_end = content.index(b"IEND") - 4
        assert end < pixels_end
        chunks = (content[:start], content[end:pixels_end], content[start:end], content[pixels_end:])
        path.write_bytes(b"".join(chunks))
    assert read_image_size(path) == read_image(path).shape[1:] == (50, 20)
    assert read_image_size(path, apply_exif=False) == (20, 50)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_gray_is_scaled_not_clipped(tmp_path, name):
    ramp = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(4, 256)
    Image.fromarray(ramp).save(tmp_path / name)
    image = read_image(tmp_path / name)
    assert np.array_equal(image[0].numpy(), (ramp >> 8).astype(np.uint8))
    assert torch.equal(image[0], image[2])
    assert 120 < image.float().mean() < 135


def test_32_bit_samples_are_refused(tmp_path):
    Image.fromarray(np.ones((3, 3), dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="convert it to 8 or 16 bits"):
        read_image(tmp_path / "a.tif")


def test_gray_palette_alpha_and_cmyk_become_rgb(tmp_path, pixels):
    gray = Image.fromarray(pixels).convert("L")
    gray.save(tmp_path / "gray.png")
    assert np.array_equal(read_image(tmp_path / "gray.png").numpy(), np.stack([np.asarray(gray)] * 3))
    rgba = np.dstack([pixels, np.zeros((20, 50), dtype=np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "rgba.png")
    assert np.array_equal(read_image(tmp_path / "rgba.png").permute(1, 2, 0).numpy(), pixels)
    palette = Image.fromarray(pixels).quantize(16)
    palette.save(tmp_path / "palette.png")
    expected = np.asarray(palette.convert("RGB"))
    assert np.array_equal(read_image(tmp_path / "palette.png").permute(1, 2, 0).numpy(), expected)
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red.save(tmp_path / "cmyk.jpg", quality=95)
    colour = read_image(tmp_path / "cmyk.jpg").float().mean((1, 2))
    assert colour[0] > 200
    assert colour[1:].max() < 60


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_decompression_bombs_are_refused_before_they_are_decoded(tmp_path, pixels, name, monkeypatch):
    """A small file may claim an image that fills the memory."""
    monkeypatch.setattr("detr.data.images.MAX_PIXELS", 900)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 450)
    monkeypatch.setattr("detr.data.images.decode_jpeg", lambda *args, **options: pytest.fail("decoded"))
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    with pytest.raises(ValueError, match=r"cannot read the image .*1000 pixels"):
        read_image(path)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"comment": b"x" * 900}])
def test_the_size_of_a_jpeg_is_found_in_its_header(tmp_path, pixels, options):
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    Image.fromarray(pixels).save(path, exif=exif, **options)
    encoded = np.fromfile(path, dtype=np.uint8)
    assert _num_jpeg_pixels(encoded) == 1000
    for length in range(len(encoded)):
        assert _num_jpeg_pixels(encoded[:length]) in (0, 1000)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.95])
def test_a_truncated_file_names_its_path(tmp_path, pixels, name, share):
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=rf"cannot read the image {path}"):
        read_image(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "absent.jpg", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no image file {path}"):
            read_image(path)
        with pytest.raises(FileNotFoundError, match=f"no image file {path}"):
            read_image_size(path)


def test_odd_images_read_as_their_manifest_says(shared_dir):
    folder = shared_dir / "data/odd-images"
    with (folder / "manifest.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 40
    for row in rows:
        path = folder / "images" / row["file"]
        if row["convert_rgb"] == "ok":
            size = (int(row["height_after_exif"]), int(row["width_after_exif"]))
            image = read_image(path)
            assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, *size)), row["file"]
            assert read_image_size(path) == size, row["file"]
        else:
            with pytest.raises(ValueError, match=rf"cannot read the image .*{row['file']}"):
                read_image(path)


def test_one_scene_in_all_exif_orientations_looks_the_same(shared_dir):
    folder = shared_dir / "data/odd-images/images"
    upright = read_image(folder / "exif_Landscape_1.jpg").float()
    for orientation in (3, 5, 6, 8):
        turned = read_image(folder / f"exif_Landscape_{orientation}.jpg").float()
        # lossy compression apart; any other orientation differs by more than 50
        assert (turned - upright).abs().mean() < 8, orientation
