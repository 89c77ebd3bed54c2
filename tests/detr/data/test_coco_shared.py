"""COCO datasets of real images, and odd files."""

from pathlib import Path

import pytest
import torch

from detr.data import CocoDataset, EvalTransform, detr_augmentation

KEEP_SIZE = EvalTransform(None, None)


def test_odd_images_train_when_the_policy_is_to_skip(shared_dir):
    folder = shared_dir / "data/odd-images"
    dataset = CocoDataset(
        folder / "instances_odd.json", folder / "images", KEEP_SIZE, training=True, faulty_images="skip"
    )
    # 45 less 4 unreadable and 5 whose annotations are of the lying photo
    assert len(dataset) == 36
    for index in range(len(dataset)):
        image, target = dataset[index]
        assert target.orig_size == image.shape[1:]


def test_coco_mini_under_the_full_recipe(shared_dir):
    root = shared_dir / "data/coco-mini"
    dataset = CocoDataset(
        root / "annotations/instances_train2017.json",
        root / "train2017",
        detr_augmentation([480, 800], 1333),
        training=True,
        label_map="category_id",
    )
    assert len(dataset) == 81
    assert dataset.class_table.num_classes == 91
    assert dataset.counts.num_crowd == 13
    torch.manual_seed(0)
    for index in range(0, 81, 8):
        image, target = dataset[index]
        assert image.shape[0] == 3
        assert min(image.shape[1:]) <= 800
        assert max(image.shape[1:]) <= 1334
        assert len(target.boxes) <= dataset._first_box[index + 1] - dataset._first_box[index]


def test_bccd_loses_its_two_boxes_without_area(shared_dir):
    root = shared_dir / "data/bccd"
    for split, num_boxes in (("train", 2805), ("val", 1138)):
        dataset = CocoDataset(root / f"annotations/instances_{split}.json", root / split, KEEP_SIZE, training=True)
        assert dataset.counts.num_without_area == 1
        assert dataset.counts.num_targets == num_boxes - 1
        assert len(dataset.coco_ground_truth()["annotations"]) == num_boxes
        assert dataset.class_table.num_classes == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clean", None),
        ("unicode_names", None),
        ("no_width_height", None),
        ("no_iscrowd_no_area_no_segmentation", None),
        ("bbox_negative_size", None),
        ("missing_image_file", r"1 of the 3 images.*\n  does_not_exist.jpg"),
    ],
)
def test_odd_annotation_files_with_their_images(shared_dir, name, message):
    folder: Path = shared_dir / "data/odd-images/annotations/derived"
    if message:
        with pytest.raises(FileNotFoundError, match=message):
            CocoDataset(folder / f"{name}.json", folder / "images", KEEP_SIZE, training=True)
        return
    dataset = CocoDataset(folder / f"{name}.json", folder / "images", KEEP_SIZE, training=True)
    boxes = [len(dataset[index][1].boxes) for index in range(len(dataset))]
    assert sum(boxes) == (16 if name == "bbox_negative_size" else 17)
    assert dataset[0][1].orig_size == (640, 480)


@pytest.mark.parametrize("apply_exif", [True, False])
def test_odd_images_load_through_a_dataset_or_name_themselves(shared_dir, apply_exif):
    """Their annotations give the sizes before EXIF rotation."""
    folder = shared_dir / "data/odd-images"
    dataset = CocoDataset(
        folder / "instances_odd.json", folder / "images", KEEP_SIZE, training=True, apply_exif=apply_exif
    )
    faults = {}
    for index in range(len(dataset)):
        path = dataset.image_path(index)
        try:
            image, target = dataset[index]
        except ValueError as error:
            kind = "swapped" if "swapped" in str(error) else "unreadable"
            faults[path.name] = kind if str(path) in str(error) else "without its path"
            continue
        assert target.orig_size == image.shape[1:]
        # one box over the whole image
        torch.testing.assert_close(target.boxes, torch.tensor([[0.5, 0.5, 1, 1]]))
    unreadable = ("apng_chunk_no_fctl.png", "broken.png", "truncated_image.png", "truncated_jpeg.jpg")
    lying = [f"exif_{name}.jpg" for name in ("Landscape_5", "Landscape_6", "Landscape_8", "Portrait_6", "Portrait_8")]
    expected = dict.fromkeys(unreadable, "unreadable") | (dict.fromkeys(lying, "swapped") if apply_exif else {})
    assert faults == expected
