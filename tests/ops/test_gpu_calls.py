"""The kernels as PyTorch calls them on a GPU: graphs, compilation, autocast, devices, and the choice of backend.

What they compute is in test_gpu.py.
"""

import logging

import pytest
import torch
import torch._dynamo.testing

import ops
from ops import BackendUnavailable, KernelConfig, MSDeformAttn, ms_deform_attn, ms_deform_attn_fused
from ops.msda.problem import Problem
from ops.msda.tuning.launch_shape import LaunchShape
from ops.testing import Case, error_ratio, random_problem, run_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch"),
]

BACKENDS = ("cuda", "triton")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PYRAMID = ((40, 60), (20, 30), (10, 15), (5, 8))
ENCODER = {"N": 3, "M": 8, "shapes": PYRAMID, "Lq": sum(H * W for H, W in PYRAMID)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_gpu(backend):
    module = MSDeformAttn(256, 4, 8, 4, kernel=KernelConfig(backend), device="cuda")
    S = ENCODER["Lq"]
    query = torch.randn(2, S, 256, device="cuda", requires_grad=True)
    points = torch.rand(2, S, 4, 2, device="cuda", requires_grad=True)
    valid_sizes = torch.tensor([[(40, 60), (20, 30), (10, 15), (5, 8)]] * 2, device="cuda")

    def step():
        module(query, points, query, PYRAMID, valid_sizes=valid_sizes).square().mean().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_capture(backend):
    problem, grad_output = random_problem(Case(**ENCODER, form=2), BF16, device="cuda")
    run_backend(backend, problem, grad_output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = run_backend(backend, problem, grad_output)
    fresh, _ = random_problem(Case(**ENCODER, form=2), BF16, device="cuda", seed=1)
    for old, new in zip(problem, fresh, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    right_output, right = run_backend(backend, problem, grad_output)
    assert torch.equal(output, right_output)
    for given, expected in zip(gradients, right, strict=True):
        assert error_ratio(given, expected) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_whole_and_once(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    kernel = KernelConfig(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def step(value, shapes, points, offsets, logits):
        return ms_deform_attn_fused(value, shapes, points, offsets, logits, kernel=kernel).square().sum()

    for H, W in ((40, 50), (36, 64), (48, 30), (40, 40)):
        case = Case(form=2, M=8, Lq=H * W, shapes=((H, W), (H // 2, W // 2)))
        value, shapes, offsets, logits, points, _ = random_problem(case, F32, device="cuda")[0]
        value.requires_grad_()
        step(value, shapes, points, offsets, logits).backward()
        expected = ms_deform_attn_fused(value, shapes, points, offsets, logits, kernel=kernel).square().sum()
        (right,) = torch.autograd.grad(expected, value)
        torch.testing.assert_close(value.grad, right, rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    value, shapes, offsets, logits, points, _ = random_problem(Case(form=2), F32, device="cuda")[0]
    sides = [side for pair in shapes for side in pair]
    for tensor in (value, offsets, logits, points):
        tensor.requires_grad_()
    arguments = (value, sides, offsets, logits, points, None, backend, "float32", False)
    torch.library.opcheck(torch.ops.msda.attend.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_and_frozen_inputs(backend):
    value, shapes, offsets, logits, points, _ = random_problem(Case(form=4), F32, device="cuda")[0]
    inputs = (value.to(BF16), points.double().float(), offsets.half(), logits)
    for tensor in inputs[1:]:
        tensor.requires_grad_()
    kernel = KernelConfig(backend)
    output = ms_deform_attn_fused(inputs[0], shapes, *inputs[1:], kernel=kernel)
    assert output.dtype == BF16
    output.float().sum().backward()
    assert [tensor.grad.dtype for tensor in inputs[1:]] == [F32, F16, F32]
    assert inputs[0].grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast(backend):
    module = MSDeformAttn(64, 4, 2, 4, kernel=KernelConfig(backend), device="cuda")
    inputs = (torch.randn(2, 9, 64, device="cuda"), torch.rand(2, 9, 4, 2, device="cuda"))
    memory = torch.randn(2, ENCODER["Lq"], 64, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        output = module(*inputs, memory, PYRAMID)
    assert output.dtype == BF16
    exact = module(*inputs, memory, PYRAMID)
    assert error_ratio(output, exact) < 3e-2
    output.float().square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward(backend):
    value, shapes, locations, weights, _, _ = random_problem(
        Case(D=8, P=2, Lq=5, shapes=((4, 5), (2, 3))), F32, device="cuda"
    )[0]
    inputs = tuple(tensor.requires_grad_() for tensor in (value, locations, weights))

    def second(kernel):
        output = ms_deform_attn(value, shapes, locations, weights, kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)

    for given, right in zip(second(KernelConfig(backend)), second(KernelConfig("reference")), strict=True):
        assert error_ratio(given, right) < 1e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_that_is_not_the_current_one(backend):
    problem, grad_output = random_problem(Case(form=2), F32, device="cuda:0")
    output, gradients = run_backend(backend, problem, grad_output)
    moved = Problem(*(x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in problem))
    with torch.cuda.device(0):
        there, there_gradients = run_backend(backend, moved, grad_output.to("cuda:1"))
    torch.testing.assert_close(there.to("cuda:0"), output, rtol=0, atol=0)
    for given, expected in zip(there_gradients, gradients, strict=True):
        torch.testing.assert_close(given.to("cuda:0"), expected, rtol=1e-4, atol=1e-5)


class TestChoice:
    def test_everything_is_available(self):
        assert all(status.available for status in ops.backends().values()), ops.backends()

    def test_auto_says_once_what_it_chose(self, caplog, monkeypatch):
        problem, _ = random_problem(Case(), F32, device="cuda")
        from ops.msda import dispatch
        from ops.msda.tuning.device import visible_device
        from ops.msda.tuning.shipped import shipped_tuning

        # whatever was tuned on this machine
        monkeypatch.setattr(dispatch, "device_tuning", lambda index: shipped_tuning(visible_device(index)))
        dispatch._resolve_once.cache_clear()
        dispatch._say_once.cache_clear()
        with caplog.at_level(logging.INFO, logger="ops"):
            for _ in range(3):
                ms_deform_attn(problem.value, problem.spatial_shapes, problem.locations, problem.weights)
        said = [record.message for record in caplog.records if record.message.startswith("kernel=auto")]
        assert said == ["kernel=auto runs cuda on cuda:0"]
        dispatch._resolve_once.cache_clear()

    def test_double_precision_is_the_reference_or_an_error(self):
        problem, _ = random_problem(Case(), F32, device="cuda")
        inputs = (problem.value.double(), problem.spatial_shapes, problem.locations, problem.weights)
        assert ms_deform_attn(*inputs).dtype == torch.float64
        for backend in BACKENDS:
            with pytest.raises(BackendUnavailable, match=r"value is torch.float64"):
                ms_deform_attn(*inputs, kernel=KernelConfig(backend))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_cpu_tensors_are_refused(self, backend):
        problem, _ = random_problem(Case(), F32)
        with pytest.raises(ValueError, match=r"value must be where kernel=\w+ can run, .* on cpu"):
            ms_deform_attn(
                problem.value, problem.spatial_shapes, problem.locations, problem.weights, kernel=KernelConfig(backend)
            )

    def test_shapes_on_the_gpu_are_refused(self):
        problem, _ = random_problem(Case(), F32, device="cuda")
        shapes = torch.tensor(problem.spatial_shapes, device="cuda")
        with pytest.raises(ValueError, match="spatial_shapes must live on the host; got a tensor on cuda:0"):
            ms_deform_attn(problem.value, shapes, problem.locations, problem.weights)

    def test_a_launch_that_fails_raises(self):
        from dataclasses import replace

        from ops.msda.cuda import backend
        from ops.msda.cuda.launch import LaunchError, launch
        from ops.msda.cuda.plan import forward_launch

        problem, _ = random_problem(Case(), F32, device="cuda")
        plan = forward_launch(backend._signature(problem), 2, problem.Lq, LaunchShape("forward", warps=4))
        prepared = backend.prepare(replace(plan, warps=64), problem.value.shape, problem.Lq, problem.spatial_shapes, 0)
        with pytest.raises(LaunchError, match=r"launching msda::forward<.*> on cuda:0 .*CUDA_ERROR"):
            launch(prepared, [0] * 12)
