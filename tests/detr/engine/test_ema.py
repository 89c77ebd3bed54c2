import pytest
import torch
from torch import nn

from detr.engine.ema import EMA


def test_parameters_are_averaged_and_buffers_copied():
    model = nn.BatchNorm1d(2)
    ema = EMA(model, decay=0.5)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.running_mean.fill_(7.0)
        model.num_batches_tracked.fill_(4)
    ema.update(model)
    # the first decay is 2 / 11: 1 * 2 / 11 + 3 * 9 / 11
    torch.testing.assert_close(ema.module.weight, torch.full((2,), 29 / 11))
    assert ema.module.running_mean.tolist() == [7.0, 7.0]
    assert ema.module.num_batches_tracked.item() == 4
    assert model.weight.tolist() == [3.0, 3.0]


def test_decay_rises_to_its_limit():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = EMA(model, decay=0.5)
    ema.num_updates = 1000
    nn.init.ones_(model.weight)
    ema.update(model)
    assert ema.module.weight.item() == pytest.approx(0.5)


def test_the_copy_evaluates_and_never_trains():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    ema = EMA(model, decay=0.9)
    assert not ema.module.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())


def test_shared_parameters_stay_shared_and_move_once():
    shared = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(shared.weight)
    model = nn.ModuleList([shared, shared])
    ema = EMA(model, decay=0.5)
    ema.num_updates = 1000
    nn.init.ones_(shared.weight)
    ema.update(model)
    assert ema.module[0].weight is ema.module[1].weight
    assert ema.module[0].weight.item() == pytest.approx(0.5)


def test_state_round_trip():
    model = nn.Linear(2, 2)
    ema = EMA(model, decay=0.9)
    nn.init.ones_(model.weight)
    ema.update(model)
    other = EMA(nn.Linear(2, 2), decay=0.9)
    other.load_state_dict(ema.state_dict())
    assert other.num_updates == 1
    assert torch.equal(other.module.weight, ema.module.weight)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1])
def test_decay_out_of_range(decay: float):
    with pytest.raises(ValueError, match="ema_decay"):
        EMA(nn.Linear(1, 1), decay)
