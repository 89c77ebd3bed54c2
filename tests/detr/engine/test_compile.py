"""Compiled regions: they take effect, in one piece, and settle on few graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from detr.distributed import DistributedContext
from detr.engine.compile import compile_regions
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.schedule import StepDecay
from detr.engine.state import build_train_state
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, deformable_detr
from detr.structures import ImageBatch


def make_model():
    torch.manual_seed(0)
    return deformable_detr(
        Backbone("resnet18"),
        num_classes=5,
        num_queries=12,
        d_model=32,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=48,
        dropout=0.0,
        with_box_refine=True,
    )


def make_images(height, width):
    generator = torch.Generator().manual_seed(height)
    sizes = ((height, width), (height - 16, width))
    return ImageBatch.from_images(
        [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    )


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """No graphs of other tests, and a backend that counts frames and keeps eager's arithmetic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, **kwargs: compile_module(module, backend=counter, **kwargs)
    )
    yield counter
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_equals_eager_and_graphs_settle(fresh_dynamo):
    eager, compiled = make_model(), make_model()
    regions = compile_regions(compiled)
    assert regions.names[:2] == ("backbone", "neck")
    assert len(regions.names) == 2 + 2 + 2
    assert list(compiled.state_dict()) == list(eager.state_dict())
    frames = []
    for size in ((96, 128), (128, 160), (160, 96), (192, 224), (96, 160)):
        images = make_images(*size)
        expected, found = eager(images), compiled(images)
        torch.testing.assert_close(found.layer_boxes, expected.layer_boxes, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.layer_logits, expected.layer_logits, atol=1e-4, rtol=1e-4)
        frames.append(fresh_dynamo.frame_count)
    assert frames[0] > 0
    # dynamic shapes after the first few sizes: no graph for each new image size
    assert frames[-1] == frames[-2]
    found.layer_boxes.sum().backward()
    assert compiled.encoder.layers[1].self_attn.value_proj.weight.grad.isfinite().all()


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"trainer.compile=true knows the regions of DeformableDETR; got Linear"):
        compile_regions(nn.Linear(2, 2))


def test_a_state_built_to_compile_says_what_it_compiled(fresh_dynamo):
    def build(compile):
        return build_train_state(
            make_model(),
            SetCriterion(num_classes=5, matcher=HungarianMatcher()),
            lambda model, total_batch: build_adamw(model, total_batch=total_batch),
            StepDecay(epochs=1, milestones=()),
            Precision("fp32"),
            DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")),
            total_batch=1,
            steps_per_epoch=1,
            ema_decay=0.9,
            compile=compile,
        )

    assert build(False).compiled is None
    state = build(True)
    assert state.compiled is not None
    assert "encoder.layers.1" in str(state.compiled)
    assert state.detector.backbone._compiled_call_impl is not None
    # the averaged copy is evaluated at other sizes, and stays as it is
    assert state.ema.module.backbone._compiled_call_impl is None
