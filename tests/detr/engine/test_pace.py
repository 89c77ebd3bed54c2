"""What is said where a run goes on with other ranks or batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from detr.data.epoch_order import EpochOrder
from detr.engine.checkpoint import Checkpoint
from detr.engine.pace import pace_change


def config(batch_size: int, accumulate: int, **sampling: bool) -> dict[str, Any]:
    return {"data": {"batch_size": batch_size, "sampling": sampling}, "trainer": {"accumulate": accumulate}}


def change(
    checkpoint: Checkpoint,
    saved: dict[str, Any],
    own: dict[str, Any],
    *,
    num_ranks: int,
    steps: int = 4,
    lr: float = 0.1,
) -> str | None:
    """From one rank with four steps an epoch and a rate of 0.1."""
    return pace_change(replace(checkpoint, config=saved), own, num_ranks=num_ranks, steps_per_epoch=steps, lr=lr)


def test_the_same_is_not_spoken_of(checkpoint: Checkpoint):
    assert change(checkpoint, config(2, 4), config(2, 4), num_ranks=1) is None
    # an older configuration that says nothing
    assert change(checkpoint, {}, config(2, 4), num_ranks=1) is None
    # that of the dataset changes the steps, which is said elsewhere
    assert change(checkpoint, config(2, 4), config(2, 4), num_ranks=1, steps=7) is None


def test_ranks_for_accumulated_batches_leave_the_step_as_it_was(checkpoint: Checkpoint):
    """By the ranks alone it would be twice as many images a step."""
    text = change(checkpoint, config(2, 4), config(2, 2), num_ranks=2)
    assert text is not None
    assert "ranks 2 instead of 1, images a forward pass 4 instead of 2. Dropout" in text
    assert text.endswith("seen once, with the same augmentation")


@pytest.mark.parametrize(
    ("own", "num_ranks", "words"),
    [
        (config(2, 4), 2, "ranks 2 instead of 1, images a forward pass 4 instead of 2, images an optimizer step 16"),
        (config(2, 1), 1, "saved with: images an optimizer step 2 instead of 8"),
        (config(8, 1), 1, "saved with: images a forward pass 8 instead of 2, steps an epoch 2"),
        ({}, 2, "saved with: ranks 2 instead of 1, steps an epoch 2 instead of 4, the learning rate 0.2 instead"),
    ],
)
def test_what_changes_is_said(checkpoint: Checkpoint, own: dict[str, Any], num_ranks: int, words: str):
    text = change(checkpoint, config(2, 4), own, num_ranks=num_ranks, steps=2, lr=0.2)
    assert text is not None
    assert words in text
    assert "steps an epoch 2 instead of 4" in text


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"group_by_aspect": True, "one_scale_a_batch": True}, "some images come twice and others not"),
        ({"one_scale_a_batch": True}, "seen once; it shares its scale with other images"),
        ({}, "with the same augmentation"),
    ],
)
def test_orders_that_follow_the_batches_are_not_promised(checkpoint: Checkpoint, sampling: dict[str, bool], words: str):
    saved, own = config(2, 4, **sampling), config(2, 2, **sampling)
    text = change(checkpoint, saved, own, num_ranks=2)
    assert text is not None
    assert words in text
    # more batches of the same images: the order stays
    text = change(checkpoint, saved, config(2, 8, **sampling), num_ranks=1)
    assert text is not None
    assert "with the same augmentation" in text


def test_what_is_said_of_the_order_is_true():
    """Half an epoch in batches of two, and what the other half then holds in batches of four."""
    for aspects, is_whole in ((np.linspace(0.5, 2, 32), False), (None, True)):
        small, large = (EpochOrder(32, seed=0, step_size=size, aspects=aspects).indices(0) for size in (2, 4))
        assert (len({*small[:16], *large[16:]}) == 32) == is_whole
