"""What the kernels compute on a GPU (scripts/test_gpu.sh); how PyTorch calls them is in test_gpu_calls.py."""

import pytest
import torch
import torch._dynamo.testing

from ops import KernelConfig, ms_deform_attn
from ops.msda.dispatch import backend_module
from ops.msda.problem import Problem
from ops.msda.tuning.launch_shape import LaunchShape
from ops.testing import Case, compare, error_ratio, random_problem, run_backend, run_reference

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
    assert_rule(problem, grad_output, *run_backend(backend, problem, grad_output, accumulator), accumulator)


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
    output, gradients = run_backend("cuda", problem, grad_output, deterministic=deterministic)
    exact_output, exact = run_reference(problem, grad_output, torch.float64)
    rounded_output, rounded = run_reference(problem, grad_output, F32)
    assert error_ratio(output, exact_output) <= 2 * error_ratio(rounded_output.to(dtype), exact_output)
    assert error_ratio(gradients.value, exact.value) <= 3 * error_ratio(rounded.value.to(dtype), exact.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_that_is_not_finite_is_seen(bad, deterministic):
    problem, grad_output = random_problem(Case(**ENCODER, spread=0.0), BF16, device="cuda")
    grad_output[2, 1234, 7] = bad
    _, gradients = run_backend("cuda", problem, grad_output, deterministic=deterministic)
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
        output, gradients = run_backend("cuda", problem, grad_output)
        assert_rule(problem, grad_output, output, gradients, "float32")
        _, first = run_backend("cuda", problem, grad_output, deterministic=True)
        assert_rule(problem, grad_output, output, first, "float32")
        # the default is deterministic where values have 16 bits
        assert problem.value.dtype == F32 or torch.equal(gradients.value, first.value)
        for _ in range(20):
            _, again = run_backend("cuda", problem, grad_output, deterministic=True)
            assert torch.equal(first.value, again.value)

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
        _, gradients = run_backend("cuda", problem, torch.zeros_like(grad_output))
        assert all((grad == 0).all() for grad in gradients[:3])
        none = problem._replace(locations=problem.locations[:, :0], weights=problem.weights[:, :0])
        _, gradients = run_backend("cuda", none, grad_output[:, :0])
        assert (gradients.value == 0).all()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_gradient_that_is_not_finite_is_seen_in_its_image_alone(self, bad):
        problem, grad_output = self.decoder(BF16)
        grad_output[1, 123, 7] = bad
        _, gradients = run_backend("cuda", problem, grad_output)
        assert not torch.isfinite(gradients.value[1]).all()
        assert torch.isfinite(gradients.value[0]).all()

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_more_queries_than_a_block_holds(self, deterministic):
        problem, grad_output = random_problem(Case(N=1, M=2, Lq=2500, shapes=PYRAMID), BF16, device="cuda")
        assert_rule(
            problem, grad_output, *run_backend("cuda", problem, grad_output, deterministic=deterministic), "float32"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_deterministic_reruns_are_bitwise_equal(backend, dtype):
    problem, grad_output = random_problem(Case(**ENCODER, form=2, padded=True), dtype, device="cuda")
    _, first = run_backend(backend, problem, grad_output, deterministic=True)
    assert_rule(problem, grad_output, backend_module(backend).forward(problem), first, "float32")
    for _ in range(20):
        _, again = run_backend(backend, problem, grad_output, deterministic=True)
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
