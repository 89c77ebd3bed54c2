"""The training step on a GPU: where the host waits, and that precisions and compilation train."""

import pytest
import torch

from detr.benchmark.steps.data import synthetic_batches
from detr.distributed import DistributedContext
from detr.engine.compile import compile_regions
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.schedule import StepDecay
from detr.engine.state import build_train_state
from detr.engine.step import train_step
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, deformable_detr
from ops import KernelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_state(*, precision="fp32", backend="cuda", two_stage=False, cuda_graphs=False, solver="auto"):
    torch.manual_seed(0)
    model = deformable_detr(
        Backbone("resnet18"),
        num_classes=5,
        num_queries=30,
        d_model=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        with_box_refine=True,
        two_stage=two_stage,
        kernel=KernelConfig(backend=backend),
    )
    return build_train_state(
        model,
        SetCriterion(num_classes=5, matcher=HungarianMatcher(solver=solver)),
        lambda model, total_batch: build_adamw(model, total_batch=total_batch, lr=5e-4, scale_lr=False),
        StepDecay(epochs=1, milestones=()),
        Precision(precision),
        DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0)),
        total_batch=4,
        steps_per_epoch=100,
        cuda_graphs=cuda_graphs,
    )


def make_batches(num_batches=2):
    return synthetic_batches(
        batch_size=4, height=192, width=256, targets_per_image=3, num_classes=5, num_batches=num_batches
    )


@pytest.mark.parametrize("two_stage", [False, True], ids=["one-stage", "two-stage"])
@pytest.mark.parametrize(
    ("backend", "cuda_graphs"), [("reference", False), ("triton", False), ("cuda", False), ("cuda", True)]
)
@pytest.mark.parametrize(("solver", "waits_a_step"), [("host", 1), ("device", 0)])
def test_the_host_waits_in_the_matcher_alone(solver, waits_a_step, backend, cuda_graphs, two_stage, monkeypatch):
    state = make_state(backend=backend, two_stage=two_stage, cuda_graphs=cuda_graphs, solver=solver)
    batches = make_batches()
    for batch in batches:  # compile kernels, build the optimizer's state
        train_step(state, [batch])
    waits = []
    cpu = torch.Tensor.cpu

    def counted_cpu(tensor):
        waits.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return cpu(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(torch.Tensor, "cpu", counted_cpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            train_step(state, [batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == waits_a_step * len(batches)


def test_both_solvers_train_alike():
    losses = {}
    for solver in ("host", "device"):
        state = make_state(solver=solver)
        state.detector.eval()  # no dropout
        losses[solver] = [float(train_step(state, [batch]).loss) for batch in make_batches(6)]
    assert losses["device"] == pytest.approx(losses["host"], rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_twenty_steps_learn(precision, backend):
    state = make_state(precision=precision, backend=backend)
    [batch] = make_batches(1)
    losses = [float(train_step(state, [batch]).loss) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0], losses


def test_compiled_steps_follow_plain_ones():
    losses = {}
    for compiled in (False, True):
        state = make_state()
        state.detector.eval()  # no dropout, so both see the same numbers
        if compiled:
            compile_regions(state.detector)
        [batch] = make_batches(1)
        losses[compiled] = [float(train_step(state, [batch]).loss) for _ in range(5)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
    torch._dynamo.reset()
