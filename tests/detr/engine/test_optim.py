import logging

import pytest
import torch
from torch import nn

from detr.engine.optim import build_adamw, describe_groups, parameter_groups


class Names(nn.Module):
    """Parameters of one element under the names that decide about groups."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"stem": nn.Linear(1, 1), "layer": nn.Linear(1, 1)})
        self.backbone["stem"].requires_grad_(False)
        self.encoder = nn.ModuleDict({"sampling_offsets": nn.Linear(1, 1), "value_proj": nn.Linear(1, 1)})
        self.queries = nn.ModuleDict({"reference_points": nn.Linear(1, 2)})
        self.level_embed = nn.Parameter(torch.zeros(3))
        head = nn.Linear(1, 1)
        self.heads = nn.ModuleList([head, head])


def test_three_groups_by_name_without_frozen_and_shared_twice():
    model = Names()
    groups = parameter_groups(model.named_parameters(remove_duplicate=False))
    assert [(group.name, len(group.parameters), group.num_elements) for group in groups] == [
        ("main", 5, 7),
        ("backbone", 2, 2),
        ("linear_proj", 4, 6),
    ]


def test_there_are_three_groups_even_if_the_backbone_is_frozen():
    model = Names()
    model.backbone.requires_grad_(False)
    optimizer = build_adamw(model, total_batch=32)
    assert [group["name"] for group in optimizer.param_groups] == ["main", "backbone", "linear_proj"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 0, 4]


def test_rates_and_decay_of_the_recipe():
    optimizer = build_adamw(Names(), total_batch=32)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-4, 2e-5, 2e-5])
    assert {group["weight_decay"] for group in optimizer.param_groups} == {1e-4}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.999)}


def test_the_rate_follows_the_batch_and_says_so(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        optimizer = build_adamw(Names(), total_batch=4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.5e-5, 2.5e-6, 2.5e-6])
    [line] = [record.message for record in caplog.records]
    assert "2.5e-05 for 4 images" in line
    assert "0.0002 is for 32 images" in line
    unscaled = build_adamw(Names(), total_batch=4, scale_lr=False)
    assert unscaled.param_groups[0]["lr"] == pytest.approx(2e-4)


def test_description_counts_tensors():
    assert "main 5 tensors 7 lr 0.0002" in describe_groups(build_adamw(Names(), total_batch=32))


def test_nothing_to_train_is_an_error():
    model = Names()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_adamw(model, total_batch=1)
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        build_adamw(Names(), total_batch=1, lr=0.0)
