from itertools import chain

import pytest
import torch

from detr.data import Draw, EpochOrder, EvalSampler, TrainSampler


def indices(sampler):
    return [draw.index for draw in sampler]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [21, 24])
def test_training_shards_are_disjoint_equally_long_and_miss_less_than_a_world(num_samples, world_size):
    shards = [
        indices(TrainSampler(EpochOrder(num_samples, seed=0), seed=0, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(shard) for shard in shards} == {num_samples // world_size}
    together = list(chain(*shards))
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(num_samples))


def test_several_ranks_see_what_one_sees_step_by_step():
    alone = list(TrainSampler(EpochOrder(24, seed=5), seed=5))
    for world_size in (2, 3, 4):
        shards = [
            list(TrainSampler(EpochOrder(24, seed=5), seed=5, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        interleaved = [draw for position in zip(*shards, strict=True) for draw in position]
        assert interleaved == alone


def test_each_epoch_and_each_seed_has_its_own_order_and_augmentation():
    sampler = TrainSampler(EpochOrder(50, seed=0), seed=0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    other = list(TrainSampler(EpochOrder(50, seed=1), seed=1))
    for draws in (second, other):
        assert [d.index for d in draws] != [d.index for d in first]
        assert sorted(d.index for d in draws) == list(range(50))
    seeds = [draw.seed for draw in first + second + other]
    assert len(set(seeds)) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_samples_left_out_differ_between_epochs():
    sampler = TrainSampler(EpochOrder(21, seed=0), seed=0, world_size=4)
    left_out = set()
    for epoch in range(8):
        seen = set()
        for rank in range(4):
            shard = TrainSampler(EpochOrder(21, seed=0), seed=0, rank=rank, world_size=4)
            shard.set_epoch(epoch)
            seen |= set(indices(shard))
        left_out |= set(range(21)) - seen
    assert len(sampler) == 5
    assert len(left_out) > 4


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("start", [0, 4, 10, 24])
def test_an_epoch_can_be_taken_up_anywhere_by_any_number_of_ranks(start, world_size):
    whole = TrainSampler(EpochOrder(24, seed=3), seed=3)
    whole.set_epoch(2)
    rest = list(whole)[start:]
    shards = []
    for rank in range(world_size):
        shard = TrainSampler(EpochOrder(24, seed=3), seed=3, rank=rank, world_size=world_size)
        shard.set_epoch(2, start=start)
        assert len(shard) == len(rest) // world_size
        shards.append(list(shard))
    assert [draw for position in zip(*shards, strict=True) for draw in position] == rest


def test_a_start_holds_for_one_call_of_set_epoch():
    sampler = TrainSampler(EpochOrder(10, seed=0), seed=0)
    sampler.set_epoch(0, start=6)
    assert len(list(sampler)) == 4
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10


@pytest.mark.parametrize("num_samples", [1, 3, 21])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_shards_hold_every_sample_once(num_samples, world_size):
    shards = [EvalSampler(num_samples, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(chain(*map(indices, shards))) == list(range(num_samples))
    assert sum(len(shard) for shard in shards) == num_samples
    assert indices(EvalSampler(4)) == [0, 1, 2, 3]


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    list(TrainSampler(EpochOrder(10, seed=0), seed=0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_draw_is_an_index_and_a_seed():
    assert next(iter(EvalSampler(3))) == Draw(index=0, seed=0)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_the_world_are_refused(rank, world_size):
    message = f"got rank {rank} of world size {world_size}"
    with pytest.raises(ValueError, match=message):
        TrainSampler(EpochOrder(4, seed=0), seed=0, rank=rank, world_size=world_size)
    with pytest.raises(ValueError, match=message):
        EvalSampler(4, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, -1), (0, 11)])
def test_positions_outside_the_epoch_are_refused(epoch, start):
    with pytest.raises(ValueError, match=f"got epoch {epoch}, start {start}"):
        TrainSampler(EpochOrder(10, seed=0), seed=0).set_epoch(epoch, start=start)
