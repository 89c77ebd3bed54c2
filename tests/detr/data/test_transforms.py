import math

import pytest
import torch
from torchvision.transforms import v2

from detr.data import (
    DetectionTransform,
    EvalTransform,
    detr_augmentation,
    flip_and_resize,
    large_scale_jitter,
    strong_augmentation,
)
from detr.data.steps import RandomSizeCrop, ResizeShortSide

# (x0, y0, x1, y1), well apart and inside an image 300 high and 500 wide
BOXES = torch.tensor([[40.0, 30, 120, 90], [300, 200, 460, 280], [200, 20, 280, 120]])


def painted(h=300, w=500, boxes=BOXES):
    """A black image where channel k is 255 inside box k."""
    image = torch.zeros(3, h, w, dtype=torch.uint8)
    for channel, (x0, y0, x1, y1) in enumerate(boxes.int().tolist()):
        image[channel, y0:y1, x0:x1] = 255
    return image


def found_box(channel):
    """The box of the pixels of (h, w) that are more than half bright."""
    y, x = torch.nonzero(channel > 127, as_tuple=True)
    return torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]).float()


def assert_boxes_fit(image, boxes, labels, tolerance=1.0):
    """Each box is where its channel is bright, to within the antialiasing of its edges."""
    assert boxes.shape == (len(labels), 4)
    for box, label in zip(boxes, labels.tolist(), strict=True):
        torch.testing.assert_close(box, found_box(image[label]), rtol=0, atol=tolerance)


TRANSFORMS = {
    "native": EvalTransform(None, None),
    "short side": EvalTransform(173, 1333),
    "short side up": EvalTransform(640, 1333),
    "long side limit": EvalTransform(640, 700),
    "stretched": EvalTransform((417, 256), None),
    "flip": flip_and_resize(None, None, flip_probability=1.0),
    "flip and resize": flip_and_resize(217, 400, flip_probability=1.0),
    "flip and stretch": flip_and_resize((300, 200), None, flip_probability=1.0),
    "detr": detr_augmentation([240, 300, 360], 640, (250, 280), (150, 260)),
    "crop": DetectionTransform([RandomSizeCrop(200, 290)]),
    "large-scale jitter": large_scale_jitter(400, (0.3, 2.0)),
    "jitter down": large_scale_jitter(320, (0.4, 0.6)),
    "jitter in a window": large_scale_jitter((200, 420), (0.6, 1.8), vertical_flip_probability=0.5),
    "turned over": large_scale_jitter((300, 500), (1.0, 1.0), 1.0, vertical_flip_probability=1.0),
    "zoom out": strong_augmentation([300], None, 0.0, 1.0, 0.0),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_boxes_stay_on_what_they_enclose(name):
    torch.manual_seed(0)
    num_boxes = 0
    for _ in range(12):
        image, boxes, labels = TRANSFORMS[name](painted(), BOXES.clone(), torch.arange(3))
        assert image.dtype == torch.uint8
        assert type(image) is type(boxes) is torch.Tensor
        assert_boxes_fit(image, boxes, labels)
        # what is gone is gone from the image as well
        for label in set(range(3)) - set(labels.tolist()):
            assert not (image[label] > 127).any()
        num_boxes += len(boxes)
    assert num_boxes > 0


@pytest.mark.parametrize("name", TRANSFORMS)
def test_images_without_boxes_pass(name):
    torch.manual_seed(0)
    _, boxes, labels = TRANSFORMS[name](painted(), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)


def test_a_flip_mirrors_the_boxes_exactly():
    flip = flip_and_resize(None, None, flip_probability=1.0)
    _, boxes, _ = flip(painted(), BOXES.clone(), torch.arange(3))
    expected = torch.stack([500 - BOXES[:, 2], BOXES[:, 1], 500 - BOXES[:, 0], BOXES[:, 3]], dim=1)
    assert torch.equal(boxes, expected)


def test_a_resize_scales_each_axis_by_its_whole_pixel_ratio():
    image, boxes, _ = EvalTransform(173, None)(painted(), BOXES.clone(), torch.arange(3))
    assert image.shape[1:] == (173, int(173 * 500 / 300))
    ratio = torch.tensor([288 / 500, 173 / 300, 288 / 500, 173 / 300])
    torch.testing.assert_close(boxes, BOXES * ratio)


def test_a_crop_may_leave_no_box():
    crop = DetectionTransform([RandomSizeCrop(10, 12)])
    torch.manual_seed(0)
    counts = [len(crop(painted(), BOXES.clone(), torch.arange(3))[1]) for _ in range(40)]
    assert 0 in counts
    assert max(counts) > 0


def test_no_resize_when_the_short_side_fits():
    image = painted()
    resized, boxes, _ = EvalTransform(300, 1333)(image, BOXES.clone(), torch.arange(3))
    assert torch.equal(resized, image)
    assert torch.equal(boxes, BOXES)


def test_the_detr_augmentation_draws_from_the_recipes_ranges():
    transform = detr_augmentation([480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800], 1333)
    image = torch.zeros(3, 480, 640, dtype=torch.uint8)
    image[:, :, :320] = 255
    torch.manual_seed(0)
    sizes, flipped = [], 0
    for _ in range(60):
        out, _, _ = transform(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        sizes.append(tuple(out.shape[1:]))
        flipped += bool(out[0, 0, -1] > 127)
    assert {min(size) for size in sizes} <= set(range(480, 801, 32))
    assert len({min(size) for size in sizes}) > 8
    # the uncropped half keeps 3:4
    uncropped = sum(math.isclose(w / h, 4 / 3, rel_tol=0.005) for h, w in sizes)
    assert 18 <= uncropped <= 42
    assert 8 <= flipped <= 45


def test_the_same_seed_gives_the_same_pixels():
    def run(seed):
        torch.manual_seed(seed)
        return TRANSFORMS["detr"](painted(), BOXES.clone(), torch.arange(3))

    for a, b in zip(run(3), run(3), strict=True):
        assert torch.equal(a, b)
    assert any(run(3)[0].shape != run(seed)[0].shape for seed in range(4, 8))


def test_evaluation_draws_no_random_numbers():
    state = torch.get_rng_state()
    EvalTransform(200, 400)(painted(), BOXES.clone(), torch.arange(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_other_v2_transforms_can_be_used():
    pipeline = DetectionTransform([v2.RandomZoomOut(p=1.0), v2.RandomPhotometricDistort(), v2.RandomVerticalFlip(1.0)])
    torch.manual_seed(0)
    image, boxes, labels = pipeline(painted(), BOXES.clone(), torch.arange(3))
    assert image.shape[1] > 300
    assert len(boxes) == len(labels) == 3


@pytest.mark.parametrize("arguments", [(800, 1333), ([320, 480], None), (None, None), ((64, 64), None)])
def test_a_description_makes_the_same_transform(arguments):
    transform = EvalTransform(*arguments)
    described = transform.describe()
    rebuilt = EvalTransform(**described)
    assert rebuilt.describe() == described
    image = painted()
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(rebuilt(image, *empty)[0], transform(image, *empty)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvalTransform(None, 1333), "max_size=1333 limits .* must be null"),
        (lambda: EvalTransform((640, 640), 1333), "must be null"),
        (lambda: EvalTransform((640,), None), r"short side or \(h, w\) in pixels; got \[640\]"),
        (lambda: EvalTransform(800, 600), "max_size=600 is below the short side 800"),
        (lambda: ResizeShortSide([], 1333), "at least 1 pixel"),
        (lambda: RandomSizeCrop(600, 384), "1 <= min_size <= max_size; got 600 and 384"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["detr", "short side", "flip and stretch"])
def test_pixels_stay_interleaved(name):
    """Padding takes five times as long otherwise."""
    torch.manual_seed(0)
    image = painted().permute(1, 2, 0).contiguous().permute(2, 0, 1)
    out, _, _ = TRANSFORMS[name](image, BOXES.clone(), torch.arange(3))
    assert out.stride(0) == 1
    assert out.stride(2) == 3


def test_jitter_reaches_both_ends_of_its_range_and_stays_in_the_square():
    torch.manual_seed(0)
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    transform = large_scale_jitter(200, (0.1, 2.0))
    sizes = [transform(torch.zeros(3, 100, 160, dtype=torch.uint8), *empty)[0].shape[1:] for _ in range(150)]
    widths = [w for _, w in sizes]
    assert max(widths) == 200
    assert min(widths) < 40
    assert max(h for h, _ in sizes) == 200


def test_a_window_keeps_its_own_shape():
    torch.manual_seed(0)
    empty = (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    transform = large_scale_jitter((120, 200), (0.5, 2.0))
    sizes = [tuple(transform(torch.zeros(3, 300, 400, dtype=torch.uint8), *empty)[0].shape[1:]) for _ in range(100)]
    # at scale 1 the height decides: 120 x 160
    assert all(h == 120 and 160 <= w <= 200 for h, w in sizes if w >= 160)
    assert (120, 200) in sizes
    assert min(h for h, _ in sizes) < 70


def test_a_vertical_flip_turns_the_image_over():
    image = torch.arange(12, dtype=torch.uint8).view(1, 4, 3).expand(3, -1, -1)
    box = torch.tensor([[0.0, 1, 2, 4]])
    flipped, boxes, _ = large_scale_jitter((4, 3), (1.0, 1.0), 0.0, 1.0)(image, box, torch.tensor([0]))
    assert torch.equal(flipped, image.flip(1))
    assert boxes.tolist() == [[0, 0, 2, 3]]


@pytest.mark.parametrize(("size", "scale_range"), [((1, 2, 3), (0.5, 1)), ((0, 5), (0.5, 1)), (5, (0, 1)), (5, (2, 1))])
def test_jitter_refuses_what_it_cannot_do(size, scale_range):
    with pytest.raises(ValueError, match=r"size must be|scale_range"):
        large_scale_jitter(size, scale_range)


def test_crops_that_keep_boxes_keep_them_in_place_and_drop_those_whose_centre_is_cut_off():
    torch.manual_seed(0)
    transform = strong_augmentation([300], None, 0.0, 0.0, 1.0, 0.0)
    num_dropped = num_cropped = 0
    for _ in range(60):
        image, boxes, labels = transform(painted(), BOXES.clone(), torch.arange(3))
        assert_boxes_fit(image, boxes, labels, tolerance=3.0)
        num_cropped += image.shape[2] != 500
        num_dropped += 3 - len(labels)
    assert num_cropped > 30
    assert num_dropped > 10


def test_a_box_is_kept_exactly_where_its_centre_is_in_the_crop():
    torch.manual_seed(0)
    transform = strong_augmentation([300], None, 0.0, 0.0, 1.0, 0.5)
    dots = torch.cat([(BOXES[:, :2] + BOXES[:, 2:]) / 2 - 4, (BOXES[:, :2] + BOXES[:, 2:]) / 2 + 4], dim=1)
    for _ in range(60):
        image, _, labels = transform(painted(boxes=dots), BOXES.clone(), torch.arange(3))
        seen = {channel for channel in range(3) if (image[channel] > 127).any()}
        assert set(labels.tolist()) <= seen
        # a dot at the very edge is half in and half out
        for channel in seen - set(labels.tolist()):
            x0, y0, x1, y1 = found_box(image[channel]).tolist()
            assert min(x0, y0, image.shape[2] - x1, image.shape[1] - y1) <= 1


def test_colours_change_and_boxes_do_not():
    torch.manual_seed(0)
    transform = strong_augmentation([300], None, 1.0, 0.0, 0.0, 0.0)
    source = painted()
    source[:, 150:200] = 90
    for _ in range(5):
        image, boxes, labels = transform(source, BOXES.clone(), torch.arange(3))
        assert image.dtype == torch.uint8
        assert image.shape == source.shape
        assert not torch.equal(image, source)
        assert torch.equal(boxes, BOXES)
        assert labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("transform", [strong_augmentation([100], None, 1.0, 1.0, 1.0), large_scale_jitter(100)])
def test_strong_augmentations_take_images_without_boxes(transform):
    torch.manual_seed(0)
    image, boxes, labels = transform(
        torch.zeros(3, 60, 80, dtype=torch.uint8), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    )
    assert image.ndim == 3
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)
