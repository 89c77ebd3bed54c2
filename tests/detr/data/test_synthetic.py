import json

import numpy as np
import pytest
import torch
from PIL import Image

from detr.data import CocoDataset, EvalTransform, SyntheticDataset, find_coco_split
from detr.data.painting import paint_background
from detr.data.placing import MIN_VISIBLE_SHARE, PlacedShape, Scene
from detr.data.shapes import SHAPES, draw_mask, mask_extents

KEEP_SIZE = EvalTransform(None, None)


def synthetic(split="train", **options):
    return SyntheticDataset(split, KEEP_SIZE, **({"num_images": 1000} | options))


@pytest.fixture(scope="module")
def truth():
    return synthetic().coco_ground_truth()


def test_the_default_set_has_small_boxes_empty_images_and_every_class(truth):
    sides = np.array([annotation["bbox"][2:] for annotation in truth["annotations"]])
    assert ((sides < 32).all(1)).mean() >= 0.25
    assert ((sides >= 32).any(1)).mean() >= 0.25
    assert sides.min() >= 8
    num_boxes = np.bincount([annotation["image_id"] for annotation in truth["annotations"]], minlength=1001)[1:]
    assert 0.05 <= (num_boxes == 0).mean() <= 0.12
    assert num_boxes.max() == 7
    assert all((num_boxes == count).any() for count in range(8))
    classes = np.bincount([annotation["category_id"] for annotation in truth["annotations"]])[1:]
    assert len(classes) >= 5
    assert classes.min() > 0.8 * classes.mean()


def test_boxes_overlap(truth):
    boxes = {}
    for annotation in truth["annotations"]:
        x, y, w, h = annotation["bbox"]
        boxes.setdefault(annotation["image_id"], []).append((x, y, x + w, y + h))
    overlapping = 0
    for of_image in boxes.values():
        corners = np.array(of_image)
        low = np.maximum(corners[:, None, :2], corners[None, :, :2])
        high = np.minimum(corners[:, None, 2:], corners[None, :, 2:])
        pairs = (high > low).all(-1) & ~np.eye(len(corners), dtype=bool)
        overlapping += pairs.any()
    assert overlapping > 0.3 * len(boxes)


def test_an_image_follows_from_seed_split_and_index():
    first, again = synthetic(seed=1), synthetic(seed=1, num_images=20)
    for index in (0, 7, 19):
        for a, b in zip(first.render(index), again.render(index), strict=True):
            assert np.array_equal(a, b)
    pixels = first.render(7)[0]
    for other in (synthetic(seed=2).render(7), synthetic("val", seed=1).render(7), first.render(8)):
        assert not np.array_equal(other[0], pixels)


def test_the_splits_have_no_image_in_common():
    seen = {synthetic("train").render(index)[0].tobytes() for index in range(100)}
    assert not seen & {synthetic("val").render(index)[0].tobytes() for index in range(100)}


def test_global_random_states_are_neither_read_nor_changed():
    dataset = synthetic()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    pixels = dataset.render(3)[0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(99)
    assert np.array_equal(dataset.render(3)[0], pixels)


def test_items_have_the_interface_of_every_dataset():
    dataset = synthetic(size=96, num_classes=14)
    assert dataset.class_table.num_classes == 14
    assert dataset.class_table.names[:2] == ("circle", "square")
    image, target = dataset[0]
    assert image.shape == (3, 96, 96)
    assert image.dtype == torch.uint8
    assert target.image_id == 1
    assert target.orig_size == (96, 96)
    _, boxes, labels = dataset.render(0)
    assert target.labels.tolist() == labels.tolist()
    x0, y0, x1, y1 = boxes[0]
    expected = torch.tensor([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0]) / 96
    torch.testing.assert_close(target.boxes[0], expected.float())


def test_the_ground_truth_lists_the_boxes_of_the_images(truth):
    dataset = synthetic()
    boxes = {}
    for annotation in truth["annotations"]:
        boxes.setdefault(annotation["image_id"], []).append((annotation["category_id"], annotation["bbox"]))
    for index in range(30):
        _, corners, labels = dataset.render(index)
        expected = [
            (label + 1, [x0, y0, x1 - x0, y1 - y0])
            for label, (x0, y0, x1, y1) in zip(labels.tolist(), corners.tolist(), strict=True)
        ]
        assert boxes.get(index + 1, []) == expected
    assert [annotation["id"] for annotation in truth["annotations"]] == list(range(1, len(truth["annotations"]) + 1))


def test_boxes_fit_the_pixels_that_were_painted():
    """What differs from the bare background is the shapes, and lone ones fill their box to the last pixel."""
    dataset, num_lone = synthetic(num_images=200), 0
    for index in range(200):
        pixels, boxes, _ = dataset.render(index)
        _, painting = dataset._generators(index)
        background = paint_background(painting, 160).clip(0, 255).astype(np.uint8)
        painted = (pixels != background).any(0)
        inside = np.zeros_like(painted)
        for x0, y0, x1, y1 in boxes:
            inside[y0:y1, x0:x1] = True
        assert not (painted & ~inside).any()
        if len(boxes) == 1:
            assert mask_extents(painted * np.uint8(255)) == tuple(boxes[0])
            num_lone += 1
    assert num_lone >= 10


@pytest.mark.parametrize("name", SHAPES)
def test_a_mask_fills_its_box_and_shapes_differ(name):
    masks = {}
    for shape in SHAPES:
        mask = draw_mask(SHAPES[shape], side_px=48, aspect=1.0, angle=0.0)
        assert mask_extents(mask) == (0, 0, mask.shape[1], mask.shape[0])
        masks[shape] = np.asarray(Image.fromarray(mask).resize((32, 32))).astype(float) / 255
    differences = [np.abs(masks[name] - other).mean() for shape, other in masks.items() if shape != name]
    assert min(differences) > 0.08


def test_a_mask_is_turned_and_stretched():
    upright = draw_mask(SHAPES["square"], side_px=40, aspect=1.0, angle=0.0)
    assert upright.shape == (36, 36)
    assert draw_mask(SHAPES["square"], side_px=40, aspect=4.0, angle=0.0).shape == (18, 72)
    turned = draw_mask(SHAPES["square"], side_px=40, aspect=1.0, angle=np.pi / 4)
    assert abs(turned.shape[0] - 36 * 2**0.5) <= 2


def test_extents_are_of_pixels_at_least_half_covered():
    mask = np.zeros((9, 12), dtype=np.uint8)
    assert mask_extents(mask) == (0, 0, 0, 0)
    mask[2:5, 3:10] = 200
    mask[0, 0] = 127
    assert mask_extents(mask) == (3, 2, 10, 5)


def test_no_shape_is_hidden_or_outside_by_more_than_its_share():
    random = np.random.default_rng(0)
    mask = draw_mask(SHAPES["circle"], side_px=50, aspect=1.0, angle=0.0)
    scene = Scene(100)
    placed = [scene.place(random, 0, mask) for _ in range(40)]
    assert any(placed)
    assert not all(placed)
    area = (mask >= 128).sum()
    shown = np.zeros((100, 100), dtype=int)
    for number, shape in enumerate(scene.shapes, start=1):
        x0, y0, x1, y1 = shape.box
        assert x0 >= 0
        assert y0 >= 0
        assert x1 <= 100
        assert y1 <= 100
        covered = shape.mask >= 128
        assert mask_extents(shape.mask) == (0, 0, x1 - x0, y1 - y0)
        assert covered.sum() >= MIN_VISIBLE_SHARE * area
        shown[y0:y1, x0:x1][covered] = number
    for number, shape in enumerate(scene.shapes, start=1):
        assert (shown == number).sum() >= MIN_VISIBLE_SHARE * (shape.mask >= 128).sum()


def test_the_image_cuts_off_no_more_than_a_share():
    random = np.random.default_rng(0)
    mask = np.full((20, 20), 255, dtype=np.uint8)
    areas = []
    for _ in range(300):
        scene = Scene(64)
        assert scene.place(random, 0, mask)
        areas.append(scene.shapes[0].mask.size)
    assert MIN_VISIBLE_SHARE * 400 <= min(areas) < 320
    assert max(areas) == 400


def test_a_cut_shape_has_the_box_of_what_is_left():
    # a right triangle whose right columns, the highest ones, lie outside
    mask = ((np.add.outer(np.arange(20), np.arange(20)) >= 19) * 255).astype(np.uint8)
    shape = Scene(100)._cut_to_image(PlacedShape(0, mask, 83, 40))
    assert shape.box == (83, 43, 100, 60)
    assert np.array_equal(shape.mask, mask[3:, :17])


def test_written_to_disk_it_is_a_coco_dataset_with_the_same_samples(tmp_path):
    for split in ("train", "val"):
        synthetic(split, num_images=12).write_coco(tmp_path)
    for split in ("train", "val"):
        drawn = synthetic(split, num_images=12)
        read = CocoDataset(
            *find_coco_split(split, root=tmp_path, annotations=None, images=None), KEEP_SIZE, training=True
        )
        assert read.class_table == drawn.class_table
        assert read.coco_ground_truth()["annotations"] == drawn.coco_ground_truth()["annotations"]
        for index in range(12):
            (image, target), (read_image, read_target) = drawn[index], read[index]
            assert torch.equal(image, read_image)
            assert torch.equal(target.boxes, read_target.boxes)
            assert torch.equal(target.labels, read_target.labels)
            assert (target.image_id, target.orig_size) == (read_target.image_id, read_target.orig_size)
    content = json.loads((tmp_path / "annotations/instances_val.json").read_text())
    assert {"info", "licenses", "images", "annotations", "categories"} <= content.keys()


def test_a_written_split_is_not_overwritten(tmp_path):
    synthetic(num_images=2).write_coco(tmp_path)
    with pytest.raises(FileExistsError, match=r"instances_train\.json exists already"):
        synthetic(num_images=2).write_coco(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "'train' or 'val'; got 'test'"),
        ({"num_images": 0}, "at least one image; got 0"),
        ({"size": 32}, "64 to 1024 pixels; got 32"),
        ({"num_classes": 99}, "2 to 14 classes; got 99"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**options)


def test_an_index_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="image 5 of the 5"):
        synthetic(num_images=5)[5]


def test_small_objects_in_large_images():
    truth = synthetic(
        num_images=200, size=384, num_classes=12, max_objects=16, min_side_px=10, max_side_share=0.2
    ).coco_ground_truth()
    sides = np.array([annotation["bbox"][2:] for annotation in truth["annotations"]])
    num_boxes = np.bincount([annotation["image_id"] for annotation in truth["annotations"]])[1:]
    assert 14 <= num_boxes.max() <= 16
    assert len({annotation["category_id"] for annotation in truth["annotations"]}) == 12
    # proportions vary, and shapes turn
    assert sides.max() < 1.6 * 0.2 * 384
    # COCO's small objects
    assert (sides.prod(1) < 32**2).mean() > 0.4
    assert sides.min() >= 3


@pytest.mark.parametrize(
    "options",
    [{"max_objects": 0}, {"max_objects": 300}, {"min_side_px": 2}, {"min_side_px": 100}, {"max_side_share": 1.5}],
)
def test_shapes_that_cannot_be_drawn_are_refused(options):
    with pytest.raises(ValueError, match=r"max_objects of synthetic images|sides of synthetic shapes"):
        synthetic(**options)
