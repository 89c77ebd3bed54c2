"""Timing of training steps on the CPU, and the gate before it."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from detr.benchmark.gate import kernel_is_verified
from detr.benchmark.steps.data import StepBatches, synthetic_batches
from detr.benchmark.steps.kernels import host_syncs, profile_kernels, summarize
from detr.benchmark.steps.throughput import PHASES, measure_steps, record_losses
from detr.distributed import DistributedContext
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.schedule import StepDecay
from detr.engine.state import build_train_state
from detr.losses import HungarianMatcher, SetCriterion
from detr.telemetry.kernel_times import KernelTime
from ops import BackendUnavailable, KernelConfig


def make_state(model):
    return build_train_state(
        model,
        SetCriterion(num_classes=5, matcher=HungarianMatcher()),
        lambda model, total_batch: build_adamw(model, total_batch=total_batch, lr=1e-3, scale_lr=False),
        StepDecay(epochs=1, milestones=()),
        Precision("fp32"),
        DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")),
        total_batch=2,
        steps_per_epoch=100,
    )


def make_batches():
    return synthetic_batches(batch_size=2, height=96, width=128, targets_per_image=3, num_classes=5, num_batches=2)


def test_steps_are_timed_and_train(small_detector):
    torch.manual_seed(0)
    state = make_state(small_detector())
    before = {name: p.detach().clone() for name, p in state.detector.named_parameters()}
    supply = StepBatches.cycle(make_batches())
    times = measure_steps(state, supply, num_warmup=1, num_steps=3)
    whole = times.whole
    assert 0 < whole.p20_ms <= whole.median_ms <= whole.p80_ms
    assert len(whole.step_ms) == 3
    assert whole.mean_ms == pytest.approx(sum(whole.step_ms) / 3)
    # one rank has nobody to average with
    assert set(times.phases_ms) == set(PHASES) - {"all_reduce"}
    # forward and backward are nearly all of a step
    assert times.phases_ms["forward"] + times.phases_ms["backward"] > 0.2 * sum(times.phases_ms.values())
    assert whole.padded_mpx == 96 * 128 / 1e6
    assert (whole.peak_gib, whole.reserved_gib) == (None, None)
    assert whole.num_recompiles == 0
    assert any(not torch.equal(before[name], p) for name, p in state.detector.named_parameters())
    started_s = time.perf_counter()
    kernels = profile_kernels(state, supply.batches, num_steps=1)
    assert kernels.msda_forward_ms > 0
    assert kernels.msda_backward_ms > 0
    assert 0 < kernels.msda_share < 0.9
    # an operator's time is its own: what calls it does not count it again
    assert kernels.kernel_ms <= (time.perf_counter() - started_s) * 1e3
    assert host_syncs(state, next(supply.batches)) is None


def test_waiting_for_data_is_part_of_the_step_and_what_lay_ready_is_not_measured(small_detector):
    batches = make_batches()
    taken = []

    def slow():
        while True:
            # five batches lie ready, of which one is for the warm-up
            if len(taken) >= 5:
                time.sleep(0.5)
            taken.append(None)
            yield batches[0]

    times = measure_steps(make_state(small_detector()), StepBatches(slow(), num_ahead=4), num_warmup=1, num_steps=2)
    assert times.whole.p20_ms > 500
    assert times.phases_ms["data"] > 500
    assert len(taken) == 1 + 4 + 2 + 2


def test_graphs_compiled_while_timed_are_counted(small_detector):
    torch._dynamo.reset()
    before = int(counters["stats"]["unique_graphs"])
    state = make_state(small_detector())
    state.detector.backbone.compile(backend="eager", dynamic=False)
    small, large = (
        synthetic_batches(batch_size=1, height=h, width=96, targets_per_image=1, num_classes=5, num_batches=1)[0]
        for h in (64, 96)
    )
    supply = StepBatches(iter([small, small, large, small, small]))
    times = measure_steps(state, supply, num_warmup=1, num_steps=2)
    assert times.num_graphs - before == 2
    assert times.whole.num_recompiles == 1
    torch._dynamo.reset()


def test_losses_follow_from_the_seed(small_detector):
    curves = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        state = make_state(small_detector(dropout=0.1))
        torch.manual_seed(seed)
        curves.append(record_losses(state, StepBatches.cycle(make_batches()), num_steps=3))
    assert len(curves[0]) == 3
    assert curves[0] == curves[1] != curves[2]


@pytest.mark.parametrize(
    ("name", "is_forward"),
    [
        ("void msda::forward<__nv_bfloat16, 4>(msda::Arguments)", True),
        ("_ZN4msda7forwardI13__nv_bfloat16EEvNS_9ArgumentsE", True),
        ("_msda_forward_kernel", True),
        ("_msda_backward_kernel", False),
        ("void msda::backward<float, 8>(msda::Arguments)", False),
        ("void msda::scatter32<float, 8>(msda::Arguments)", False),
        ("void at::native::grid_sampler_2d_kernel<float, int>(int)", True),
        ("void at::native::grid_sampler_2d_backward_kernel<float, int>(int)", False),
    ],
)
def test_kernels_of_the_attention_are_told_apart(name, is_forward):
    times = [KernelTime("gemm", 6.0, 4), KernelTime(name, 2.0, 2)]
    kernels = summarize(times, num_steps=2)
    assert (kernels.msda_forward_ms, kernels.msda_backward_ms) == ((1.0, 0.0) if is_forward else (0.0, 1.0))
    assert (kernels.kernel_ms, kernels.num_kernels, kernels.msda_share) == (4.0, 3.0, 0.25)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waits_of_the_host_are_counted_with_their_place(monkeypatch):
    from detr.benchmark.steps import kernels as step_kernels

    tensor = torch.ones(3, device="cuda")

    def step(state, window):
        tensor.sum().item()
        for _ in range(2):
            tensor.cpu()

    monkeypatch.setattr(step_kernels, "train_step", step)
    places = host_syncs(SimpleNamespace(device=torch.device("cuda", 0)), None)
    assert sorted(places.values()) == [1, 2]
    assert all(place.startswith("benchmark/steps/test_throughput.py:") for place in places)
    assert torch.cuda.get_sync_debug_mode() == 0


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
