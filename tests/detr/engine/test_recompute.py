"""Recomputed encoder layers: the same gradients, dropout included, for less that is kept."""

import pytest
import torch
from torch import nn

from detr.engine.settings import TrainerSettings
from detr.engine.state import recompute_encoder
from detr.models import Backbone, deformable_detr
from detr.structures import ImageBatch


def make_model():
    torch.manual_seed(0)
    return deformable_detr(
        Backbone("test_resnet"),
        num_classes=5,
        num_queries=12,
        d_model=32,
        num_heads=4,
        num_encoder_layers=3,
        num_decoder_layers=1,
        dim_feedforward=64,
        dropout=0.3,
    ).train()


def gradients_and_kept(model, images):
    """All gradients, and the bytes of the distinct tensors kept for the backward pass."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.manual_seed(1)
        output = model(images)
        loss = output.layer_logits.square().sum() + output.layer_boxes.sum()
    total = sum(kept.values())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, total


def test_gradients_are_the_same_and_less_is_kept():
    images = ImageBatch.from_images([torch.randint(0, 256, (3, 96, 128), dtype=torch.uint8) for _ in range(2)])
    plain, recomputed = make_model(), make_model()
    recompute_encoder(recomputed)
    expected, kept = gradients_and_kept(plain, images)
    mine, kept_recomputed = gradients_and_kept(recomputed, images)
    assert mine.keys() == expected.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert kept_recomputed < 0.8 * kept


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="recompute=false"):
        recompute_encoder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="cuda_graphs"):
        TrainerSettings(cuda_graphs=True, recompute=True)
