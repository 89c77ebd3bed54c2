"""The kernels on a GPU (scripts/test_gpu.sh)."""

import logging

import pytest
import torch
import torch._dynamo.testing

import ops
from ops import BackendUnavailable, KernelConfig, MSDeformAttn, ms_deform_attn, ms_deform_attn_fused
from ops.msda.dispatch import backend_module
from ops.msda.problem import Problem
from ops.msda.tuning.launch_shape import LaunchShape
from ops.testing import Case, compare, error_ratio, random_problem, run_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch"),
]

BACKENDS = ("cuda", "triton")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CELLS = [(F32, "float32"), (F16, "float32"), (F16, "native"), (BF16, "float32"), (BF16, "native")]
CELL_IDS = ["fp32", "fp16", "fp16-native", "bf16", "bf16-native"]
ALL = (True, True, True, True)
PYRAMID = ((40, 60), (20, 30), (10, 15), (5, 8))
ENCODER = {"N": 3, "M": 8, "shapes": PYRAMID, "Lq": sum(H * W for H, W in PYRAMID)}
CASES = [
    Case(),
    Case(**ENCODER),
    Case(**ENCODER, form=2, padded=True),
    Case(**ENCODER, form=4, spread=0.05),
    Case(D=20, P=3, M=1, form=2, padded=True),
]
# launch shapes of the CUDA kernels: cheap to compile, so more of them
CUDA_CASES = [
    *CASES,
    Case(**{**ENCODER, "P": 8, "M": 3}),
    Case(N=1, Lq=22223, shapes=((71, 313),)),
    *[Case(D=D, Lq=33, form=2) for D in (1, 8, 16, 33, 48, 64, 96, 256)],
    *[Case(P=P, D=16) for P in (1, 2, 5, 16)],
    *[Case(shapes=((5, 6), (3, 4)) * (L // 2) + ((2, 2),) * (L % 2), D=32) for L in (1, 3, 5, 8, 16)],
]


def run(backend, problem, grad_output, accumulator="float32", deterministic=False, needs=ALL):
    module = backend_module(backend)
    if problem.reference_points is None:
        needs = (*needs[:3], False)
    return module.forward(problem), module.backward(problem, grad_output, needs, accumulator, deterministic)


def assert_rule(problem, grad_output, output, gradients, accumulator):
    comparisons = compare(problem, grad_output, output, gradients, accumulator)
    assert len(comparisons) == (4 if problem.reference_points is None else 5)
    assert all(comparison.passed for comparison in comparisons), "\n".join(map(str, comparisons))


@pytest.mark.parametrize(("dtype", "accumulator"), CELLS, ids=CELL_IDS)
@pytest.mark.parametrize(
    ("backend", "case"),
    [("cuda", case) for case in CUDA_CASES] + [("triton", case) for case in CASES],
    ids=lambda value: str(value),
)
def test_errors_are_within_the_rule(backend, case, dtype, accumulator):
    problem, grad_output = random_problem(case, dtype, device="cuda")
    assert_rule(problem, grad_output, *run(backend, problem, grad_output, accumulator), accumulator)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_beyond_every_window_are_right(deterministic, spread, dtype):
    """Offsets from none to ten times the map."""
    case = Case(**ENCODER, form=2)
    problem, grad_output = random_problem(case, dtype, device="cuda")
    offsets = torch.randn_like(problem.locations) * spread * 40
    # the cells themselves, as an encoder has them
    points = torch.cat(
        [
            torch.stack(
                torch.meshgrid((torch.arange(W) + 0.5) / W, (torch.arange(H) + 0.5) / H, indexing="xy"), -1
            ).view(-1, 2)
            for H, W in PYRAMID
        ]
    )
    points = points.cuda()[None, :, None].expand(3, -1, 4, -1).contiguous()
    problem = problem._replace(locations=offsets, reference_points=points)
    output, gradients = run("cuda", problem, grad_output, deterministic=deterministic)
    exact_output, exact = run_reference(problem, grad_output, torch.float64)
    rounded_output, rounded = run_reference(problem, grad_output, F32)
    assert error_ratio(output, exact_output) <= 2 * error_ratio(rounded_output.to(dtype), exact_output)
    assert error_ratio(gradients.value, exact.value) <= 3 * error_ratio(rounded.value.to(dtype), exact.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_that_is_not_finite_is_seen(bad, deterministic):
    problem, grad_output = random_problem(Case(**ENCODER, spread=0.0), BF16, device="cuda")
    grad_output[2, 1234, 7] = bad
    _, gradients = run("cuda", problem, grad_output, deterministic=deterministic)
    assert not torch.isfinite(gradients.value).all()
    assert torch.isfinite(gradients.value[:2]).all() or deterministic


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("options", [{}, {"form": 2, "padded": True}, {"form": 4, "spread": 0.05}], ids=str)
@pytest.mark.parametrize("tile_px", [5, 8, 100])
def test_tiles_change_the_order_alone(dtype, options, tile_px):
    """Queries of an encoder tile by tile, and as they come."""
    problem, grad_output = random_problem(Case(**ENCODER, **options), dtype, device="cuda")
    needs = (*ALL[:3], problem.reference_points is not None)

    def run_shapes(tile_px):
        forward = LaunchShape("forward", warps=32, unroll=2, tile_px=tile_px)
        dots = LaunchShape("dots32", warps=20, tile_px=tile_px)
        scatter = LaunchShape("scatter32", warps=16, min_blocks=2, tile_px=14)
        # what is not written is seen
        poison = torch.full((problem.value.numel() * 4,), torch.nan, device="cuda")
        del poison
        return backend.forward(problem, (forward,)), backend.backward(
            problem, grad_output, needs, "float32", False, (dots, scatter)
        )

    backend = backend_module("cuda")
    output, gradients = run_shapes(tile_px)
    assert_rule(problem, grad_output, output, gradients, "float32")
    assert torch.equal(output, run_shapes(0)[0])


class TestFewQueries:
    """A decoder's value gradient: rows written once, corners of a cell in any order."""

    def decoder(self, dtype, **options):
        return random_problem(Case(N=2, M=8, Lq=300, shapes=PYRAMID, **options), dtype, device="cuda")

    def check(self, problem, grad_output):
        # what is not written is seen
        poison = torch.full((problem.value.numel() * 4,), torch.nan, device="cuda")
        del poison
        output, gradients = run("cuda", problem, grad_output)
        assert_rule(problem, grad_output, output, gradients, "float32")
        for _ in range(20):
            _, again = run("cuda", problem, grad_output, deterministic=True)
            assert torch.equal(gradients.value, again.value)

    @pytest.mark.parametrize("dtype", [F32, F16, BF16])
    @pytest.mark.parametrize(
        "options", [{}, {"form": 2, "padded": True}, {"form": 4, "spread": 0.05}, {"spread": 3.0}], ids=str
    )
    def test_errors_and_reruns(self, dtype, options):
        self.check(*self.decoder(dtype, **options))

    @pytest.mark.parametrize("dtype", [F32, F16, BF16])
    def test_all_samples_in_one_cell(self, dtype):
        problem, grad_output = self.decoder(dtype)
        problem.locations.fill_(0.5)
        problem.locations.add_(torch.rand_like(problem.locations) * 1e-3)
        self.check(problem, grad_output)

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_one_huge_gradient_among_small_ones(self, dtype):
        problem, grad_output = self.decoder(dtype)
        grad_output[1, 77, 5] = 3e4
        self.check(problem, grad_output)

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_range_of_float32(self, scale):
        problem, grad_output = self.decoder(F32)
        self.check(problem, grad_output * scale)

    def test_zero_gradients_and_none_at_all(self):
        problem, grad_output = self.decoder(BF16)
        _, gradients = run("cuda", problem, torch.zeros_like(grad_output))
        assert all((grad == 0).all() for grad in gradients[:3])
        none = problem._replace(locations=problem.locations[:, :0], weights=problem.weights[:, :0])
        _, gradients = run("cuda", none, grad_output[:, :0])
        assert (gradients.value == 0).all()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_is_seen_in_its_image_alone(self, bad):
        problem, grad_output = self.decoder(BF16)
        grad_output[1, 123, 7] = bad
        _, gradients = run("cuda", problem, grad_output)
        assert not torch.isfinite(gradients.value[1]).all()
        assert torch.isfinite(gradients.value[0]).all()

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_more_queries_than_a_block_holds(self, deterministic):
        problem, grad_output = random_problem(Case(N=1, M=2, Lq=2500, shapes=PYRAMID), BF16, device="cuda")
        assert_rule(problem, grad_output, *run("cuda", problem, grad_output, deterministic=deterministic), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_deterministic_reruns_are_bitwise_equal(backend, dtype):
    problem, grad_output = random_problem(Case(**ENCODER, form=2, padded=True), dtype, device="cuda")
    _, first = run(backend, problem, grad_output, deterministic=True)
    assert_rule(problem, grad_output, backend_module(backend).forward(problem), first, "float32")
    for _ in range(20):
        _, again = run(backend, problem, grad_output, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_deterministic_algorithms_are_honoured():
    problem, grad_output = random_problem(Case(**ENCODER), BF16, device="cuda")
    value = problem.value.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        grads = [
            torch.autograd.grad(
                ms_deform_attn(
                    value, problem.spatial_shapes, problem.locations, problem.weights, kernel=KernelConfig(backend)
                ),
                value,
                grad_output,
            )[0]
            for backend in ("cuda", "cuda", "triton", "triton", "reference", "reference")
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grads[i], grads[i + 1]) for i in (0, 2, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_any_size_equal_their_images(backend):
    module = backend_module(backend)
    problem, _ = random_problem(Case(N=154), F32, device="cuda")

    def part(start, stop):
        return problem._replace(
            **{name: getattr(problem, name)[start:stop] for name in ("value", "locations", "weights")}
        )

    singles = torch.cat([module.forward(part(n, n + 1)) for n in range(154)])
    for N in (1, 3, 65, 154):
        assert torch.equal(module.forward(part(0, N)), singles[:N])
    assert module.forward(part(0, 0)).shape == (0, 37, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_2_to_31_elements(backend):
    shapes = ((100, 200),)
    N, Lq, M, D = 430, 5, 8, 32
    value = torch.zeros(N, 20000, M, D, device="cuda", dtype=BF16)
    value[-1].normal_()
    assert value.numel() > 2**31
    locations = torch.rand(N, Lq, M, 1, 4, 2, device="cuda")
    weights = torch.rand(N, Lq, M, 1, 4, device="cuda")
    problem = Problem(value, shapes, locations, weights)
    last = Problem(value[-1:], shapes, locations[-1:], weights[-1:])
    module = backend_module(backend)
    assert torch.equal(module.forward(problem)[-1:], module.forward(last))
    grad_output = torch.randn(N, Lq, M * D, device="cuda", dtype=BF16)
    needs = (True, True, True, False)
    gradients = module.backward(problem, grad_output, needs, "float32", False)
    right = module.backward(last, grad_output[-1:], needs, "float32", False)
    for given, expected in zip(gradients[:3], right[:3], strict=True):
        torch.testing.assert_close(given[-1:], expected, rtol=1e-2, atol=1e-3)


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
    run(backend, problem, grad_output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = run(backend, problem, grad_output)
    fresh, _ = random_problem(Case(**ENCODER, form=2), BF16, device="cuda", seed=1)
    for old, new in zip(problem, fresh, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    right_output, right = run(backend, problem, grad_output)
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
    output, gradients = run(backend, problem, grad_output)
    moved = Problem(*(x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in problem))
    with torch.cuda.device(0):
        there, there_gradients = run(backend, moved, grad_output.to("cuda:1"))
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
        from ops.msda.tuning.launch_shape import LaunchShape

        problem, _ = random_problem(Case(), F32, device="cuda")
        plan = forward_launch(backend._signature(problem), 2, problem.Lq, LaunchShape("forward", warps=4))
        prepared = backend.prepare(replace(plan, warps=64), problem.value.shape, problem.Lq, problem.spatial_shapes, 0)
        with pytest.raises(LaunchError, match=r"launching msda::forward<.*> on cuda:0 .*CUDA_ERROR"):
            launch(prepared, [0] * 12)
