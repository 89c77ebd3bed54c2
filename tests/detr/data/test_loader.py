import contextlib
import gc
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from detr.data import (
    CocoDataset,
    DetectionTransform,
    EvalTransform,
    SyntheticDataset,
    build_train_loader,
    build_val_loader,
    detr_augmentation,
)
from detr.structures import ClassTable, Target


def augmented(num_images=10):
    transforms = detr_augmentation([64, 80, 96], 120, (70, 90), (48, 80))
    return SyntheticDataset("train", transforms, num_images=num_images, size=64)


def train_loader(dataset, **options):
    return build_train_loader(dataset, **({"batch_size": 2, "num_workers": 0, "pad_to": 1, "seed": 0} | options))


def val_loader(dataset, **options):
    return build_val_loader(dataset, **({"batch_size": 2, "num_workers": 0, "pad_to": 1} | options))


def contents(loader):
    return [
        (batch.images.pixels, batch.images.sizes, [(t.image_id, t.boxes, t.labels) for t in batch.targets])
        for batch in loader
    ]


def assert_same(first, second):
    assert len(first) == len(second)
    for (pixels, sizes, targets), (other_pixels, other_sizes, other_targets) in zip(first, second, strict=True):
        assert torch.equal(pixels, other_pixels)
        assert torch.equal(sizes, other_sizes)
        for (image_id, boxes, labels), (other_id, other_boxes, other_labels) in zip(
            targets, other_targets, strict=True
        ):
            assert image_id == other_id
            assert torch.equal(boxes, other_boxes)
            assert torch.equal(labels, other_labels)


def test_pixels_do_not_depend_on_the_number_of_workers():
    runs = []
    for num_workers in (0, 1, 2):
        loader = train_loader(augmented(), num_workers=num_workers)
        torch.manual_seed(num_workers)
        run = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            run += contents(loader)
        runs.append(run)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_augmentation_differs_between_epochs_and_seeds():
    def sizes(seed, epoch):
        loader = train_loader(augmented(), seed=seed)
        loader.set_epoch(epoch)
        return {
            target.image_id: tuple(size.tolist())
            for batch in loader
            for target, size in zip(batch.targets, batch.images.sizes, strict=True)
        }

    assert sizes(0, 0) == sizes(0, 0)
    assert sizes(0, 0) != sizes(0, 1)
    assert sizes(0, 0) != sizes(1, 0)


def test_two_ranks_load_what_one_loads():
    alone = [target for batch in train_loader(augmented(), batch_size=4) for target in batch.targets]
    ranks = [
        [target for batch in train_loader(augmented(), rank=rank, world_size=2) for target in batch.targets]
        for rank in range(2)
    ]
    together = [target for pair in zip(*ranks, strict=True) for target in pair]
    assert [target.image_id for target in together[:8]] == [target.image_id for target in alone]
    for ours, expected in zip(together, alone, strict=False):
        assert torch.equal(ours.boxes, expected.boxes)


def test_a_resumed_epoch_goes_on_with_the_same_batches():
    whole = contents(train_loader(augmented()))
    loader = train_loader(augmented(), num_workers=1)
    loader.set_epoch(0, start=6)
    assert len(loader) == 2
    assert_same(contents(loader), whole[3:])
    loader.set_epoch(0)
    assert len(loader) == 5


def test_an_iteration_left_early_does_not_disturb_the_next():
    loader = train_loader(augmented(), num_workers=1)
    for _ in loader:
        break
    assert_same(contents(loader), contents(train_loader(augmented())))


def test_loading_in_this_process_leaves_its_random_numbers_alone():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    expected = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    for num_workers in (0, 1):
        contents(train_loader(augmented(4), num_workers=num_workers))
        assert torch.equal(torch.get_rng_state(), expected[0])
        assert np.array_equal(np.random.get_state()[1], expected[1])  # noqa: NPY002
        assert random.getstate() == expected[2]


class DrawingDataset:
    """Gives away in its boxes what the three generators draw."""

    class_table = ClassTable(("a",), (1,))

    def __len__(self):
        return 8

    def load(self, index, batch_draw):
        draws = [float(torch.rand(())), float(np.random.rand()), random.random(), 0.5]  # noqa: NPY002
        target = Target(torch.zeros(1, dtype=torch.int64), torch.tensor([draws]), index, (4, 4))
        return torch.zeros(3, 4, 4, dtype=torch.uint8), target

    def coco_ground_truth(self):
        raise NotImplementedError


def test_all_three_generators_are_seeded_for_each_sample():
    runs = []
    for num_workers in (0, 2):
        random.seed()
        np.random.seed()  # noqa: NPY002
        loader = train_loader(DrawingDataset(), num_workers=num_workers)
        runs.append(torch.cat([target.boxes for batch in loader for target in batch.targets]))
    assert torch.equal(*runs)
    for column in range(3):
        assert len(runs[0][:, column].unique()) == 8


def test_training_batches_are_full_and_evaluation_drops_nothing():
    dataset = SyntheticDataset("train", EvalTransform(None, None), num_images=7, size=64)
    assert [len(batch) for batch in train_loader(dataset)] == [2, 2, 2]
    loader = val_loader(dataset)
    assert [len(batch) for batch in loader] == [2, 2, 2, 1]
    assert [t.image_id for batch in loader for t in batch.targets] == list(range(1, 8))
    with pytest.raises(ValueError, match="evaluation has no epochs"):
        loader.set_epoch(1)


def test_evaluation_on_several_ranks_sees_each_image_once():
    dataset = SyntheticDataset("val", EvalTransform(None, None), num_images=3, size=64)
    seen = [
        [t.image_id for batch in val_loader(dataset, rank=rank, world_size=4) for t in batch.targets]
        for rank in range(4)
    ]
    assert seen == [[1], [2], [3], []]


@pytest.mark.parametrize(("num_images", "batch_size", "world_size"), [(1, 4, 1), (7, 4, 2)])
def test_a_training_set_smaller_than_a_step_is_an_error_with_the_numbers(num_images, batch_size, world_size):
    with pytest.raises(
        ValueError,
        match=rf"takes {batch_size * world_size} images \(batch size {batch_size} x {world_size} ranks\), but the "
        rf"training set has {num_images}",
    ):
        train_loader(augmented(num_images), batch_size=batch_size, world_size=world_size)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"num_workers": -1}])
def test_counts_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="batch_size >= 1 and num_workers >= 0"):
        val_loader(augmented(), **options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("break_image", [lambda path: path.write_bytes(path.read_bytes()[:500]), Path.unlink])
def test_a_bad_sample_raises_with_its_own_message_and_no_other(write_dataset, content, num_workers, break_image):
    annotations, images = write_dataset(content)
    dataset = CocoDataset(annotations, images, EvalTransform(None, None), training=False)
    break_image(images / "a.png")
    with pytest.raises((ValueError, OSError)) as error:
        contents(val_loader(dataset, num_workers=num_workers))
    message = str(error.value)
    assert f"{images}/a.png" in message
    # torch would put the worker's stack trace into the message; it is kept beside it
    assert "Traceback" not in message
    assert "worker" not in message
    assert "read_image" in error.value.__notes__[0]


class OwnError(ValueError):
    """Does not come out of pickle: it needs two values, and pickle has one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class UnsendableError(OSError):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class SilentError(ValueError):
    """Comes out of pickle without its message."""

    def __init__(self, message=""):
        super().__init__()
        self.message = message

    def __str__(self):
        return self.message

    def __reduce__(self):
        return SilentError, ()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "base"),
    [
        (OwnError("one", "two"), ValueError),
        (UnsendableError("one and two"), OSError),
        (SilentError("one and two"), ValueError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "one and two"), ValueError),
        (FileNotFoundError(2, "one and two", "file"), FileNotFoundError),
    ],
)
def test_whatever_error_a_sample_raises_arrives(error, base, num_workers):
    """What cannot be sent is lost in a worker, and the main process would wait forever."""

    class Faulty(DrawingDataset):
        def load(self, index, batch_draw):
            raise error

    with pytest.raises(base, match="one and two") as found:
        contents(val_loader(Faulty(), num_workers=num_workers))
    assert "raise error" in found.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_whose_sample_failed_goes_without_the_garbage_collection(num_workers):
    """Workers that are found by that are waited for, 5 s each."""

    class Faulty(DrawingDataset):
        def load(self, index, batch_draw):
            raise ValueError("bad")

    loader = val_loader(Faulty(), num_workers=num_workers)
    is_there = weakref.ref(loader)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            contents(loader)
        del loader
        assert is_there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_iteration_ends_when_another_begins(num_workers):
    """The workers serve one: the other would get its batches."""
    loader = val_loader(augmented(12), num_workers=num_workers)
    first = iter(loader)
    next(first)
    second = iter(loader)
    batches = [next(second)]
    with pytest.raises(RuntimeError, match="build two loaders"):
        next(first)
    batches += second
    for batch, expected in zip(batches, val_loader(augmented(12)), strict=True):
        assert torch.equal(batch.images.pixels, expected.images.pixels)
    assert len(list(loader)) == len(batches)


def test_a_fault_of_ours_in_a_worker_keeps_its_stack_trace():
    class Broken(DrawingDataset):
        def load(self, index, batch_draw):
            raise KeyError("ours")

    with pytest.raises(KeyError, match=r"(?s)Traceback.*ours"):
        contents(val_loader(Broken(), num_workers=1))


def test_batches_of_images_without_boxes_load():
    class Empty(DrawingDataset):
        def load(self, index, batch_draw):
            target = Target(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), index, (4, 4))
            return torch.zeros(3, 4, 4, dtype=torch.uint8), target

    for batch_size in (1, 2):
        batch = next(iter(train_loader(Empty(), batch_size=batch_size)))
        assert len(batch) == batch_size
        assert all(target.boxes.shape == (0, 4) for target in batch.targets)


def test_the_loader_accepts_any_v2_pipeline():
    transforms = DetectionTransform([v2.RandomPhotometricDistort(p=1.0), v2.RandomHorizontalFlip()])
    dataset = SyntheticDataset("train", transforms, num_images=4, size=64)
    assert_same(contents(train_loader(dataset)), contents(train_loader(dataset, num_workers=1)))
