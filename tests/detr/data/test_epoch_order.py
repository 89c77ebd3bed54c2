import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from detr.data import EpochOrder, Sampling, SyntheticDataset, TrainSampler, build_train_loader, detr_augmentation
from detr.data.epoch_order import repeat_factors

ASPECTS = np.random.default_rng(0).choice([0.5, 0.75, 1.0, 1.33, 1.34, 2.0], 400)


def draws(sampler, epoch=0, **options):
    sampler.set_epoch(epoch, **options)
    return list(sampler)


def test_grouping_takes_every_sample_once_and_other_batches_each_epoch():
    order = EpochOrder(403, seed=1, step_size=8, aspects=np.append(ASPECTS, [1, 1, 1]))
    first, second = order.indices(0), order.indices(1)
    assert sorted(first) == sorted(second) == list(range(403))
    assert np.array_equal(first, order.indices(0))
    assert len({tuple(sorted(step)) for step in first[:400].reshape(-1, 8)}) == 50
    shared = {tuple(sorted(s)) for s in first[:400].reshape(-1, 8)} & {
        tuple(sorted(s)) for s in second[:400].reshape(-1, 8)
    }
    assert not shared


def test_the_images_of_a_step_have_like_aspects_and_steps_come_in_any_order():
    order = EpochOrder(400, seed=1, step_size=8, aspects=ASPECTS).indices(0).reshape(-1, 8)
    spread = np.ptp(ASPECTS[order], axis=1)
    # six aspects: at most one step each holds two of them
    assert (spread > 0.01).sum() <= 6
    means = ASPECTS[order].mean(1)
    assert 0 < sum(a < b for a, b in pairwise(means)) < len(means) - 1
    ungrouped = EpochOrder(400, seed=1).indices(0).reshape(-1, 8)
    assert np.ptp(ASPECTS[ungrouped], axis=1).mean() > 1


@pytest.mark.parametrize(
    "sampling",
    [{}, {"aspects": ASPECTS}, {"repeat_factors": np.linspace(1, 3, 400)}, {"passes": 2, "aspects": ASPECTS}],
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_step_and_resume_anywhere(sampling, world_size):
    def sampler(rank, world):
        order = EpochOrder(400, seed=3, step_size=8, **sampling)
        return TrainSampler(order, seed=3, rank=rank, world_size=world, one_scale_a_batch=True)

    alone = draws(sampler(0, 1), epoch=2)
    shards = [draws(sampler(rank, world_size), epoch=2) for rank in range(world_size)]
    assert [draw for step in zip(*shards, strict=True) for draw in step] == alone[: len(shards[0]) * world_size]
    # after five steps of eight
    rest = [draws(sampler(rank, world_size), epoch=2, start=40) for rank in range(world_size)]
    assert [shard[40 // world_size :] for shard in shards] == rest


def test_the_samples_of_a_step_share_their_draw_and_steps_differ():
    for world_size in (1, 2):
        shards = [
            draws(
                TrainSampler(
                    EpochOrder(40, seed=0, step_size=8),
                    seed=0,
                    rank=rank,
                    world_size=world_size,
                    one_scale_a_batch=True,
                )
            )
            for rank in range(world_size)
        ]
        steps = [
            {draw.batch_draw for shard in shards for draw in shard[first : first + 8 // world_size]}
            for first in range(0, 40 // world_size, 8 // world_size)
        ]
        assert [len(step) for step in steps] == [1] * 5
        values = [step.pop() for step in steps]
        assert len(set(values)) == 5
        assert all(0 <= value < 1 for value in values)
    assert draws(TrainSampler(EpochOrder(8, seed=0), seed=0))[0].batch_draw is None
    seeds = {draw.seed for draw in draws(TrainSampler(EpochOrder(40, seed=0, step_size=8), seed=0))}
    assert not seeds & {int(value * 2**63) for value in values}


def test_a_batch_has_one_short_side_where_it_is_asked_for():
    dataset = SyntheticDataset(
        "train", detr_augmentation(list(range(64, 200, 8)), 260, (70, 90), (48, 80)), num_images=40, size=64
    )

    def short_sides(sampling, num_workers=0):
        loader = build_train_loader(dataset, batch_size=4, num_workers=num_workers, pad_to=1, seed=0, sampling=sampling)
        return [[min(size) for size in batch.images.sizes.tolist()] for batch in loader]

    together = short_sides(Sampling(one_scale_a_batch=True))
    # an image much longer than high is limited by its long side instead
    assert sum(len(set(batch)) == 1 for batch in together) >= 8
    assert len({batch[0] for batch in together}) > 4
    assert sum(len(set(batch)) == 1 for batch in short_sides(Sampling())) <= 1
    assert short_sides(Sampling(one_scale_a_batch=True), num_workers=2) == together


def test_repeated_samples_come_floor_or_ceil_times_and_on_average_their_factor():
    factors = np.array([1.0, 1.0, 1.3, 2.0, 2.7, 4.5] * 20)
    order = EpochOrder(120, seed=0, repeat_factors=factors)
    counts = np.stack([np.bincount(order.indices(epoch), minlength=120) for epoch in range(60)])
    assert len(order) == round(factors.sum())
    assert set(counts.sum(1).tolist()) == {len(order)}
    assert (counts >= np.floor(factors * (1 - 1e-9))).all()
    assert (counts <= np.ceil(factors * (1 + 1e-9))).all()
    assert np.abs(counts.mean(0) - factors).max() < 0.25
    assert not np.array_equal(order.indices(0), order.indices(1))
    # the copies of an image are spread over the epoch
    assert (np.diff(order.indices(0)) == 0).mean() < 0.1


def test_an_epoch_of_several_passes_sees_every_image_in_each():
    order = EpochOrder(30, seed=0, passes=3)
    passes = order.indices(1).reshape(3, 30)
    assert len(order) == 90
    assert (np.sort(passes, axis=1) == np.arange(30)).all()
    assert not np.array_equal(passes[0], passes[1])
    # one pass is what it always was
    assert np.array_equal(passes[0], EpochOrder(30, seed=0).indices(1))
    factors = np.array([1.0, 2.0] * 15)
    assert np.bincount(EpochOrder(30, seed=0, repeat_factors=factors, passes=2).indices(0)).tolist() == [2, 4] * 15


def test_repeat_factors_follow_the_formula():
    # class 0 in every image, class 1 in 1 of 4, class 2 in 2 of 4
    first_box = np.array([0, 3, 5, 6, 6])
    labels = np.array([0, 1, 1, 0, 2, 2])
    found = repeat_factors(first_box, labels, 4, threshold=0.5)
    assert found.tolist() == pytest.approx([2**0.5, 1, 1, 1])
    found = repeat_factors(first_box, labels, 4, threshold=1.0)
    assert found.tolist() == pytest.approx([2, 2**0.5, 2**0.5, 1])


def test_rare_classes_come_more_often_from_a_dataset(write_dataset, content):
    from detr.data import CocoDataset, EvalTransform

    content["annotations"] = [{"id": 1, "image_id": 7, "category_id": 90, "bbox": [1, 1, 5, 5]}] + [
        {"id": 2 + i, "image_id": (7, 3, 12)[i], "category_id": 1, "bbox": [1, 1, 5, 5]} for i in range(3)
    ]
    dataset = CocoDataset(*write_dataset(content), EvalTransform(None, None), training=True)
    assert dataset.repeat_factors(1.0).tolist() == pytest.approx([3**0.5, 1, 1])
    assert dataset.aspects().tolist() == pytest.approx([40 / 30, 20 / 50, 1])
    loader = build_train_loader(
        dataset, batch_size=1, num_workers=0, pad_to=1, seed=0, sampling=Sampling(repeat_threshold=1.0)
    )
    assert len(loader) == 4
    assert sorted(batch.targets[0].image_id for batch in loader) == [3, 7, 7, 12]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(repeat_threshold=0), r"share of the images in \(0, 1\]"),
        (lambda: Sampling(repeat_threshold=2), "got 2"),
        (lambda: Sampling(passes=0), "passes must be a whole number of at least 1; got 0"),
        (lambda: EpochOrder(4, seed=0, aspects=np.ones(3)), "one of aspects a sample; got 3 for 4"),
        (lambda: EpochOrder(2, seed=0, repeat_factors=np.array([0.5, 1])), "at least 1; got 0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_global_generators_are_left_alone():
    states = torch.get_rng_state(), json.dumps(np.random.get_state()[1].tolist())  # noqa: NPY002
    EpochOrder(400, seed=1, step_size=8, aspects=ASPECTS, repeat_factors=np.ones(400) * 1.5).indices(0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert json.dumps(np.random.get_state()[1].tolist()) == states[1]  # noqa: NPY002
