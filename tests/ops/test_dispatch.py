"""Which backend runs, and what is said when none can."""

import logging
from dataclasses import replace

import pytest
import torch

import ops
from ops import BackendUnavailable, KernelConfig, ms_deform_attn, ms_deform_attn_fused
from ops.msda import dispatch
from ops.msda.library import attend
from ops.msda.problem import Gradients
from ops.msda.tuning import device as tuning_device
from ops.msda.tuning.device import choice_for
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.table import Device, Row, Tuning
from ops.testing import Case, random_problem

H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
SHIPPED = shipped_tuning(H200)
# as tuning would find it where Triton has the faster forward pass
MIXED = Tuning(
    (Row(replace(SHIPPED.rows[0].choice, backend="triton"), direction="forward"), *SHIPPED.rows), "tuned (x.json)"
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")


@pytest.fixture
def problem():
    return random_problem(Case(N=1, M=1, D=4, Lq=3), torch.float32)[0]


def call(problem, kernel=None):
    return ms_deform_attn(problem.value, problem.spatial_shapes, problem.locations, problem.weights, kernel=kernel)


@without_gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_named_backend_that_cannot_run_raises_with_the_reason(problem, backend):
    with pytest.raises(BackendUnavailable, match=rf"kernel={backend} was asked for, but no .*GPU is visible to torch"):
        call(problem, KernelConfig(backend))
    status = ops.backends()[backend]
    assert not status.available
    assert "GPU is visible" in status.reason


def test_auto_on_the_cpu_is_the_reference(problem):
    assert torch.equal(call(problem), call(problem, KernelConfig("reference")))
    assert ops.backends()["reference"].available


class TestAutoOnAGpu:
    """With stand-ins for the kernel backends, since the choice is made before anything runs."""

    class Stand:
        def __init__(self, reason=None):
            self.reason = reason

        def unavailable_reason(self, device=None):
            return self.reason

        def unsupported_reason(self, dtypes, num_levels):
            return "value is float64" if ("value", torch.float64) in dtypes else None

    def resolve(self, monkeypatch, stands, dtype=torch.float32, backend="auto", tuning=SHIPPED):
        monkeypatch.setattr(dispatch, "backend_module", lambda name: stands[name])
        monkeypatch.setattr(dispatch, "device_tuning", lambda index: tuning)
        dispatch._resolve_once.cache_clear()
        dispatch._say_once.cache_clear()
        try:
            return [dispatch._resolve(backend, "cuda", 0, (dtype, dtype, dtype, None), 4) for _ in range(3)]
        finally:
            dispatch._resolve_once.cache_clear()

    def test_takes_the_first_that_can(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, logger="ops")
        stands = {"cuda": self.Stand(), "triton": self.Stand()}
        assert self.resolve(monkeypatch, stands) == ["cuda"] * 3
        assert [record.message for record in caplog.records] == ["kernel=auto runs cuda on cuda:0"]

    def test_falls_back_with_the_reason_and_says_so_once(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, logger="ops")
        stands = {"cuda": self.Stand("no cuda-bindings"), "triton": self.Stand()}
        assert self.resolve(monkeypatch, stands) == ["triton"] * 3
        (record,) = caplog.records
        assert record.message == "kernel=auto runs triton on cuda:0; not cuda: no cuda-bindings"

    def test_the_slow_reference_is_a_warning(self, monkeypatch, caplog):
        stands = {"cuda": self.Stand(), "triton": self.Stand("no triton")}
        assert self.resolve(monkeypatch, stands, torch.float64) == ["reference"] * 3
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "not cuda: value is float64; not triton: no triton" in record.message

    def test_where_the_table_has_two_winners_the_shape_class_decides(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, logger="ops")
        stands = {"cuda": self.Stand(), "triton": self.Stand()}
        assert self.resolve(monkeypatch, stands, tuning=MIXED) == ["auto"] * 3
        (record,) = caplog.records
        assert record.message == "kernel=auto runs what won the shape class on cuda:0, tuned (x.json)"

    def test_a_winner_that_cannot_run_does_not_win(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, logger="ops")
        stands = {"cuda": self.Stand(), "triton": self.Stand("no triton")}
        assert self.resolve(monkeypatch, stands, tuning=MIXED) == ["cuda"] * 3
        assert caplog.records[0].message == "kernel=auto runs cuda on cuda:0; not triton: no triton"
        everywhere = replace(MIXED, rows=(replace(MIXED.rows[0], direction=None),))
        assert self.resolve(monkeypatch, stands, tuning=everywhere) == ["cuda"] * 3

    def test_a_named_backend_does_not_fall_back(self, monkeypatch):
        stands = {"cuda": self.Stand("the driver is too old"), "triton": self.Stand()}
        with pytest.raises(BackendUnavailable, match="kernel=cuda was asked for, but the driver is too old"):
            self.resolve(monkeypatch, stands, backend="cuda")
        stands = {"cuda": self.Stand(), "triton": self.Stand()}
        with pytest.raises(BackendUnavailable, match=r"value is float64\. Use kernel=reference or kernel=auto"):
            self.resolve(monkeypatch, stands, torch.float64, backend="cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_each_direction_runs_its_winner(monkeypatch, problem, compiled):
    """Forward on one backend and backward on the other, in eager and through torch's dispatcher alike."""
    ran = []

    class Stand:
        def __init__(self, name):
            self.name = name

        def forward(self, problem):
            ran.append((self.name, "forward"))
            return problem.value.new_ones(1, 3, 4)

        def backward(self, problem, grad_output, needs, accumulator, deterministic):
            ran.append((self.name, "backward"))
            return Gradients(torch.full_like(problem.value, 2), None, None, None)

    stands = {"cuda": Stand("cuda"), "triton": Stand("triton")}
    monkeypatch.setattr(dispatch, "backend_module", lambda name: stands[name])
    monkeypatch.setattr(tuning_device, "device_tuning", lambda index: MIXED)
    monkeypatch.setattr(tuning_device, "visible_device", lambda index: H200)
    choice_for.cache_clear()

    def step(value):
        return attend(problem._replace(value=value), "auto", "float32", False)

    try:
        value = problem.value.requires_grad_()
        run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        for _ in range(2):
            output = run(value)
            (grad,) = torch.autograd.grad(output.sum(), value)
            assert (output == 1).all()
            assert (grad == 2).all()
        assert ran == [("triton", "forward"), ("cuda", "backward")] * 2
        # the table is asked once a shape
        assert choice_for.cache_info().misses == 2
    finally:
        choice_for.cache_clear()


def test_second_derivatives_of_the_reference():
    """grid_sample's backward has none of its own; the gathered form gives them."""
    problem, _ = random_problem(Case(N=1, M=1, D=2, P=1, Lq=2, shapes=((3, 4), (2, 2)), form=2), torch.float64)
    value, shapes, offsets, logits, points, _ = problem
    points = points.double() * 0.5 + 0.25
    # away from the kinks at cell centres
    for level, (H, W) in enumerate(shapes):
        for axis, side in ((0, W), (1, H)):
            pixels = points[:, :, None, level, None, axis] * side - 0.5 + offsets[:, :, :, level, :, axis]
            fraction = (pixels - pixels.floor()).clamp(0.2, 0.8)
            offsets[:, :, :, level, :, axis] += pixels.floor() + fraction - pixels
    inputs = tuple(tensor.requires_grad_() for tensor in (value, points, offsets, logits))

    def function(value, points, offsets, logits):
        return ms_deform_attn_fused(value, shapes, points, offsets, logits, kernel=KernelConfig("reference"))

    assert torch.autograd.gradgradcheck(function, inputs)


def test_a_masked_query_gives_zero_and_gets_no_gradient():
    problem, _ = random_problem(Case(form=4), torch.float32)
    value, shapes, offsets, logits, points, _ = problem
    logits[:, 3] = float("-inf")
    inputs = tuple(tensor.requires_grad_() for tensor in (value, points, offsets, logits))
    output = ms_deform_attn_fused(value, shapes, points, offsets, logits)
    assert (output[:, 3] == 0).all()
    output.square().sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in inputs)
    assert all((tensor.grad[:, 3] == 0).all() for tensor in inputs[1:])
    assert (logits.grad[:, 2] != 0).any()
