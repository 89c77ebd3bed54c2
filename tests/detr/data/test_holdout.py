"""The images that are held out: the fraction, the same ones always, classes and images without boxes in both splits."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from detr.data import load_coco_annotations
from detr.data.faults import Fault
from detr.data.holdout import held_out, take_part
from detr.data.layouts import Part


@pytest.fixture
def annotate(tmp_path):
    """Annotations of images "0.jpg", "1.jpg", ... with boxes of the given classes, in any order."""

    def make(classes, order=None, names=None, crowd=()):
        order = range(len(classes)) if order is None else order
        num_classes = max(map(max, filter(None, classes)), default=1)
        content = {
            "images": [
                {"id": 1000 - i, "file_name": names[i] if names else f"{i}.jpg", "width": 9, "height": 9} for i in order
            ],
            "categories": [{"id": c, "name": f"c{c}"} for c in range(1, 1 + num_classes)],
            "annotations": [
                {"image_id": 1000 - i, "category_id": c, "bbox": [1, 1, 3, 3], "iscrowd": int(i in crowd)}
                for i in order
                for c in classes[i]
            ],
        }
        path = tmp_path / "a.json"
        path.write_text(json.dumps(content))
        return load_coco_annotations(path)

    return make


def chosen_names(annotations, fraction):
    chosen = np.flatnonzero(held_out(annotations, fraction))
    return {annotations.file_names[index] for index in chosen.tolist()}


def by_class(annotations, chosen):
    """Images with each class id, None for those without boxes, among the chosen ones and the others."""
    found = {True: Counter(), False: Counter()}
    for index in range(len(annotations.image_ids)):
        rows = slice(annotations.first_box[index], annotations.first_box[index + 1])
        labels = {annotations.category_ids[c] for c in annotations.categories[rows].tolist()} or {None}
        found[bool(chosen[index])].update(labels)
    return found[True], found[False]


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("num_images", [20, 101, 1000])
def test_the_fraction_is_kept_to_the_image(annotate, num_images, fraction):
    random = np.random.default_rng(0)
    classes = [set(random.integers(1, 7, random.integers(0, 4)).tolist()) for _ in range(num_images)]
    assert held_out(annotate(classes), fraction).sum() == round(num_images * fraction)


def test_the_order_of_the_images_changes_nothing(annotate):
    random = np.random.default_rng(1)
    classes = [set(random.integers(1, 9, random.integers(0, 4)).tolist()) for _ in range(300)]
    expected = chosen_names(annotate(classes), 0.1)
    for _ in range(5):
        assert chosen_names(annotate(classes, order=random.permutation(300).tolist()), 0.1) == expected


def test_the_choice_is_this_one_in_every_process(annotate):
    """Written down, as a checkpoint that goes on must not meet another one in a later version."""
    annotations = annotate([{1 + i % 3} if i % 5 else set() for i in range(30)])
    expected = chosen_names(annotations, 0.2)
    assert expected == {"1.jpg", "2.jpg", "6.jpg", "10.jpg", "16.jpg", "18.jpg"}
    program = (
        "import sys; from detr.data import load_coco_annotations; from detr.data.holdout import held_out; "
        "a = load_coco_annotations(sys.argv[1]); "
        "print(sorted(a.file_names[i] for i in held_out(a, 0.2).nonzero()[0].tolist()))"
    )
    command = [sys.executable, "-c", program, str(annotations.path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found.strip() == str(sorted(expected))


def test_another_name_may_choose_others_and_another_id_does_not(annotate):
    classes = [{1} for _ in range(200)]
    plain = held_out(annotate(classes), 0.1)
    assert (plain == held_out(annotate(classes, names=[f"./{i}.jpg" for i in range(200)]), 0.1)).all()
    assert (plain != held_out(annotate(classes, names=[f"b{i}.jpg" for i in range(200)]), 0.1)).any()


def test_rare_classes_are_in_both_splits(annotate):
    # 1 in all images, 2 in 2 of them, 3 in 3, 4 in 10
    classes = [{1} | ({2} if i < 2 else set()) | ({3} if i in (5, 6, 7) else set()) | ({4} if 20 <= i < 30 else set())
               for i in range(100)]  # fmt: skip
    annotations = annotate(classes)
    val, train = by_class(annotations, held_out(annotations, 0.1))
    assert val[1] == 10
    assert (val[2], train[2]) == (1, 1)
    assert (val[3], train[3]) == (1, 2)
    assert 1 <= val[4] <= 3


@pytest.mark.parametrize("seed", range(20))
def test_a_class_of_two_images_or_more_is_in_both_splits(annotate, seed):
    """Long-tailed classes, several in an image."""
    random = np.random.default_rng(seed)
    classes = [set(np.minimum(random.zipf(1.6, random.integers(1, 4)), 12).tolist()) for _ in range(300)]
    annotations = annotate(classes)
    val, train = by_class(annotations, held_out(annotations, 0.1))
    for label, count in (val + train).items():
        assert train[label] >= 1
        if count >= 20:
            assert val[label] >= 1
        # no class gives more than a few images beyond its share
        assert val[label] <= 0.1 * count + 8


def test_the_only_image_of_a_class_trains(annotate):
    for rare in range(10):
        annotations = annotate([{1, 2} if i == rare else {1} for i in range(10)])
        assert not held_out(annotations, 0.5)[rare]


def test_where_every_image_is_the_only_one_of_its_class_the_fraction_still_counts(annotate):
    assert held_out(annotate([{i + 1} for i in range(10)]), 0.3).sum() == 3


def test_images_without_boxes_are_held_out_by_the_same_fraction(annotate):
    annotations = annotate([{1} if i % 4 else set() for i in range(400)])
    val, train = by_class(annotations, held_out(annotations, 0.1))
    assert (val[None], train[None]) == (10, 90)
    assert (val[1], train[1]) == (30, 270)


def test_both_splits_get_images_with_boxes_first(annotate):
    # the one image to hold out of ten is one with boxes, and the only one with boxes trains
    annotations = annotate([{1} if i < 2 else set() for i in range(10)])
    assert held_out(annotations, 0.1)[:2].sum() == 1
    annotations = annotate([{1} if i < 1 else set() for i in range(10)])
    assert not held_out(annotations, 0.5)[0]


def test_images_of_crowds_only_count_as_without_boxes(annotate):
    annotations = annotate([{1} for _ in range(40)], crowd=set(range(20)))
    assert held_out(annotations, 0.1)[:20].sum() == 2


def test_images_of_one_file_stay_together(annotate):
    names = [f"{i // 2}.jpg" for i in range(100)]
    chosen = held_out(annotate([{1} for _ in range(100)], names=names), 0.1)
    assert (chosen[::2] == chosen[1::2]).all()
    assert chosen.sum() == 10


@pytest.mark.parametrize(
    ("num_images", "fraction", "message"),
    [
        (4, 0.1, r"of the 4 images .* leaves none for validation. Set it between 0.25 and 0.75"),
        (4, 0.9, r"leaves none for training. Set it between 0.25 and 0.75"),
        (1, 0.5, r"leaves none for validation. Add images"),
    ],
)
def test_an_empty_split_is_refused(annotate, num_images, fraction, message):
    with pytest.raises(ValueError, match=message):
        held_out(annotate([{1} for _ in range(num_images)]), fraction)


def test_the_parts_divide_images_boxes_and_faults(annotate):
    annotations = annotate([{1, 2} if i % 3 else set() for i in range(50)])
    faults = [Fault("k", "fault", "f", "p", "a", image_id=image_id) for image_id in [*range(951, 1001), None, [7], "x"]]
    parts = {split: take_part(annotations, faults, Part(split, 0.2)) for split in ("train", "val")}
    (train, train_faults), (val, val_faults) = parts["train"], parts["val"]
    assert len(val.image_ids) == 10
    assert sorted([*train.image_ids, *val.image_ids]) == sorted(annotations.image_ids)
    assert len(train.boxes) + len(val.boxes) == len(annotations.boxes)
    assert {fault.image_id for fault in val_faults} == set(val.image_ids.tolist())
    # what belongs to no image is said once
    assert [fault.image_id for fault in train_faults][-3:] == [None, [7], "x"]
    assert len(train_faults) + len(val_faults) == len(faults)
    assert train.category_ids == val.category_ids == annotations.category_ids
