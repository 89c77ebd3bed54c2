"""Steps of the transforms: sizes, crops, and boxes cut by them."""

import numpy as np
import pytest
import torch
from PIL import Image

from detr.data import (
    DetectionTransform,
    EvalTransform,
)
from detr.data.steps import RandomSizeCrop, clip_boxes, resize, resized_size


@pytest.mark.parametrize(
    ("image_size", "size", "max_size", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1066)),
        ((640, 480), 800, 1333, (1066, 800)),
        ((480, 640), 480, 1333, (480, 640)),
        ((500, 500), 800, 1333, (800, 800)),
        # round(1333 * 375 / 1242) = 402, int(402 * 1242 / 375) = 1331
        ((375, 1242), 800, 1333, (402, 1331)),
        # the long side exceeds the limit by one: round(1333 * 2 / 3) = 889, int(889 * 3 / 2) = 1333; by 1 below
        ((200, 300), 900, 1333, (889, 1333)),
        # rounded up, not down: 1333 * 480 / 1000 = 639.84
        ((480, 1000), 800, 1333, (640, 1333)),
        ((30, 750), 800, 1333, (53, 1325)),
        ((1, 5000), 800, 1333, (1, 5000)),
        ((480, 640), 800, None, (800, 1066)),
    ],
)
def test_the_size_rule_of_the_recipe(image_size, size, max_size, expected):
    assert resized_size(image_size, size, max_size) == expected


def test_the_long_side_may_exceed_its_limit_by_one_pixel_and_no_more():
    excess = {
        max(resized_size((short, long), 800, 1333)) - 1333
        for short in range(200, 500, 7)
        for long in range(short, 3 * short, 3)
    }
    assert max(excess) == 1


def test_a_shrunk_image_is_antialiased():
    checks = (torch.arange(400)[:, None] + torch.arange(400)) % 2 * 255
    image = checks.to(torch.uint8).expand(3, -1, -1)
    small, _, _ = EvalTransform(133, None)(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    # without antialiasing single pixels are picked and the grey is lost
    assert (small.float() - 127.5).abs().max() < 20


def test_crops_have_sides_between_the_limits_and_the_image():
    torch.manual_seed(0)
    crop = DetectionTransform([RandomSizeCrop(384, 600)])
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    shapes = [crop(torch.zeros(3, 500, 300, dtype=torch.uint8), *empty)[0].shape[1:] for _ in range(200)]
    assert {w for _, w in shapes} == {300}
    heights = [h for h, _ in shapes]
    assert min(heights) < 390
    assert max(heights) > 494
    assert all(384 <= h <= 500 for h in heights)


def test_crops_reach_every_size_and_place():
    torch.manual_seed(0)
    crop = DetectionTransform([RandomSizeCrop(2, 3)])
    image = torch.arange(9, dtype=torch.uint8).reshape(1, 3, 3).expand(3, -1, -1)
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    crops = {(tuple(out.shape[1:]), int(out[0, 0, 0])) for out, _, _ in (crop(image, *empty) for _ in range(300))}
    assert crops == {
        *(((2, 2), corner) for corner in (0, 1, 3, 4)),
        *(((2, 3), corner) for corner in (0, 3)),
        *(((3, 2), corner) for corner in (0, 1)),
        ((3, 3), 0),
    }


def test_clip_boxes_keeps_those_with_an_area():
    boxes = np.float32([[-5.0, 2, 4, 8], [12, 3, 20, 5], [3, 3, 3, 9], [5, 5, 4, 6], [8, 1, 30, 30]])
    clipped, kept = clip_boxes(boxes, h=7, w=10)
    assert kept.tolist() == [True, False, False, False, True]
    assert clipped[kept].tolist() == [[0, 2, 4, 7], [8, 1, 10, 7]]


@pytest.mark.parametrize("size", [(240, 320), (311, 415), (480, 640), (800, 1066), (37, 1333)])
def test_resizing_equals_pillows_to_one_level(size):
    """The parity that docs/data.md states: what the original training sees, to the last bit of rounding."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    # smooth, with full contrast, and noisy
    photo = np.asarray(Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC))
    noise = np.random.default_rng(1).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    for source in (photo, noise):
        expected = np.asarray(Image.fromarray(source).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
        image = torch.from_numpy(source.copy()).permute(2, 0, 1)
        found, _, _ = resize(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), size)
        difference = np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected)
        assert difference.max() <= 1
        # the fixed-point weights of a long average, as in the last size, round apart more often
        assert (difference > 0).mean() < (0.01 if min(size) > 200 else 0.5)
