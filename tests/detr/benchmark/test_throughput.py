"""Timing of training steps on the CPU, and the gate before it."""

import pytest
import torch

from detr.benchmark.gate import kernel_is_verified
from detr.benchmark.throughput import PHASES, measure_steps, msda_share, synthetic_batches
from detr.distributed import DistributedContext
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.schedule import StepDecay
from detr.engine.state import build_train_state
from detr.losses import HungarianMatcher, SetCriterion
from ops import BackendUnavailable, KernelConfig


def test_steps_are_timed_and_train(small_detector):
    torch.manual_seed(0)
    state = build_train_state(
        small_detector(),
        SetCriterion(num_classes=5, matcher=HungarianMatcher()),
        lambda model, total_batch: build_adamw(model, total_batch=total_batch, lr=1e-3, scale_lr=False),
        StepDecay(epochs=1, milestones=()),
        Precision("fp32"),
        DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")),
        total_batch=2,
        steps_per_epoch=100,
    )
    before = {name: p.detach().clone() for name, p in state.detector.named_parameters()}
    batches = synthetic_batches(batch_size=2, height=96, width=128, targets_per_image=3, num_classes=5, num_batches=2)
    times = measure_steps(state, batches, num_warmup=1, num_steps=3)
    assert 0 < times.step_ms_p20 <= times.step_ms <= times.step_ms_p80
    assert set(times.phases_ms) == set(PHASES)
    # forward and backward are nearly all of a step
    assert times.phases_ms["forward"] + times.phases_ms["backward"] > 0.2 * times.step_ms
    assert times.peak_gib is None
    assert any(not torch.equal(before[name], p) for name, p in state.detector.named_parameters())
    assert 0 < msda_share(state, batches, num_steps=1) < 0.9


def test_synthetic_batches_are_the_same_every_time_and_padded():
    sizes = {"batch_size": 3, "height": 64, "width": 96, "targets_per_image": 2, "num_classes": 5, "num_batches": 1}
    [first], [second] = synthetic_batches(**sizes), synthetic_batches(**sizes)
    assert torch.equal(first.images.pixels, second.images.pixels)
    assert first.images.pixels.shape == (3, 3, 64, 96)
    assert first.images.padding_mask.any()
    assert [len(target.labels) for target in first.targets] == [2, 2, 2]


def test_gate():
    cpu = torch.device("cpu")
    assert kernel_is_verified(KernelConfig(backend="reference"), "fp32", cpu) is None
    with pytest.raises(ValueError, match="needs a named backend"):
        kernel_is_verified(KernelConfig(), "fp32", cpu)
    with pytest.raises(BackendUnavailable):
        kernel_is_verified(KernelConfig(backend="cuda"), "fp32", cpu)
