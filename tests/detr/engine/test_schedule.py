import math

import pytest
import torch
from torch.optim import SGD

from detr.engine.schedule import Cosine, LRSchedule, StepDecay


def test_step_decay_cuts_before_the_epoch_after_the_milestone():
    curve = StepDecay(epochs=50, milestones=(40,))
    assert curve.factor(40 * 7 - 1, 7) == 1.0
    assert curve.factor(40 * 7, 7) == pytest.approx(0.1)
    assert StepDecay(epochs=12, milestones=(8, 11)).factor(11, 1) == pytest.approx(0.01)


def test_cosine_goes_from_one_to_the_final_factor():
    curve = Cosine(epochs=2, final_factor=0.2)
    assert curve.factor(0, 10) == 1.0
    assert curve.factor(10, 10) == pytest.approx(0.6)
    assert curve.factor(20, 10) == pytest.approx(0.2)
    assert curve.factor(25, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("curve", [Cosine(epochs=3, warmup_steps=4), StepDecay(3, (2,), warmup_steps=4)])
def test_warmup_rises_linearly_to_the_full_rate(curve: Cosine | StepDecay):
    assert [curve.factor(step, 10) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_each_group_keeps_its_ratio_and_state_is_restored():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = SGD([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 0.1}])
    schedule = LRSchedule(optimizer, StepDecay(epochs=3, milestones=(1, 2)), steps_per_epoch=2)
    for _ in range(2):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    other = LRSchedule(SGD(weights, lr=5.0), StepDecay(epochs=3, milestones=(1, 2)), steps_per_epoch=2)
    other.load_state_dict(schedule.state_dict())
    # the rate is that of the new run, the place in the schedule that of the saved one
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_another_pace_goes_on_at_the_same_epoch():
    weight = torch.zeros(1, requires_grad=True)
    saved = {"num_steps": 30, "steps_per_epoch": 10}
    schedule = LRSchedule(SGD([weight], lr=1.0), Cosine(epochs=6), steps_per_epoch=4)
    schedule.load_state_dict(saved)
    assert schedule.num_steps == 12
    assert schedule.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StepDecay(epochs=0, milestones=()), "schedule.epochs"),
        (lambda: StepDecay(epochs=9, milestones=(5, 3)), "schedule.milestones"),
        (lambda: StepDecay(epochs=9, milestones=(), gamma=0), "schedule.gamma"),
        (lambda: Cosine(epochs=9, warmup_steps=-1), "schedule.warmup_steps"),
        (lambda: Cosine(epochs=9, final_factor=2), "schedule.final_factor"),
    ],
)
def test_values_out_of_range_name_the_key(make, words: str):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()
