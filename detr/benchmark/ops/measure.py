"""Measuring one backend of the operator on one workload."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detr.benchmark.ops.inputs import DTYPES, OpCase, compulsory_bytes, make_inputs
from detr.benchmark.ops.row import OpRow
from ops import KernelConfig, ms_deform_attn
from ops.msda.problem import Gradients, Problem
from ops.msda.reference import ms_deform_attn_reference
from ops.testing import Case as ParityCase
from ops.testing import compare, error_ratio, random_problem, run_reference
from ops.timing import Timing, host_time_us, num_rotated, time_cuda

# small enough for a float64 reference, large enough that every path of the kernels is taken
_PARITY_SHAPES = ((40, 60), (20, 30), (10, 15), (5, 8))
_PARITY = ParityCase(N=3, M=8, Lq=sum(H * W for H, W in _PARITY_SHAPES), shapes=_PARITY_SHAPES)


@dataclass(frozen=True)
class OpVariant:
    """What is measured.

    Attributes:
        backend: cuda | triton | grid_sample | deformops.
        accumulator: float32 | native.
        deterministic: Whether reruns must be bitwise equal.
    """

    backend: str
    accumulator: str = "float32"
    deterministic: bool = False

    def function(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The operator as (value, locations, weights) -> output.

        Raises:
            ValueError: An unknown backend, or `auto`, which would not say what was measured.
            ImportError: The peer is not installed.
        """
        shapes = problem.spatial_shapes
        if self.backend in ("cuda", "triton"):
            kernel = KernelConfig(self.backend, self.accumulator, self.deterministic)  # type: ignore[arg-type]
            return lambda value, locations, weights: ms_deform_attn(value, shapes, locations, weights, kernel=kernel)
        if self.backend == "grid_sample":
            return lambda value, locations, weights: ms_deform_attn_reference(value, shapes, locations, weights)
        if self.backend == "deformops":
            return _deformops(problem, self.accumulator)
        raise ValueError(
            f"a row's backend must be cuda, triton, grid_sample or deformops; got {self.backend!r}. "
            "auto would not say what was measured"
        )


@dataclass(frozen=True)
class Samples:
    """Milliseconds of each timed call.

    Attributes:
        forward_ms: Under no_grad.
        forward_grad_ms: With gradients recorded.
        backward_ms: All three gradients.
        host_forward_us: Until a forward call with gradients returns to Python, one number a round; decoder only.
    """

    forward_ms: list[float]
    forward_grad_ms: list[float]
    backward_ms: list[float]
    host_forward_us: list[float]

    def extend(self, other: "Samples") -> None:
        self.forward_ms.extend(other.forward_ms)
        self.forward_grad_ms.extend(other.forward_grad_ms)
        self.backward_ms.extend(other.backward_ms)
        self.host_forward_us.extend(other.host_forward_us)


def check_variant(case: OpCase, dtype_name: str, variant: OpVariant, *, seed: int) -> OpRow:
    """A row with errors and memory, not yet timed; a kernel that misses its error bound says so in `status`."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    row = OpRow(
        case.kind,
        case.batch_size,
        case.noise_px,
        dtype_name,
        variant.backend,
        variant.accumulator,
        variant.deterministic,
        "ok",
    )
    if variant.backend in ("cuda", "triton"):
        failures = _parity_failures(variant, dtype, device)
        if failures:
            return replace(row, status="error bound missed: " + "; ".join(failures), verified=False)
        row = replace(row, verified=True)
    problem, grad_output = make_inputs(case, dtype, device, seed=seed)
    row = _with_errors(row, problem, grad_output, variant)
    return replace(row, peak_mib=_peak_mib(problem, grad_output, variant))


def check_or_say_why(case: OpCase, dtype_name: str, variant: OpVariant, *, seed: int) -> OpRow:
    """`check_variant`, or a row that says that the peer is not installed."""
    try:
        return check_variant(case, dtype_name, variant, seed=seed)
    except ImportError as error:
        reason = f"not installed ({error})"
    names = (variant.backend, variant.accumulator, variant.deterministic)
    return OpRow(case.kind, case.batch_size, case.noise_px, dtype_name, *names, reason)


def time_variant(
    case: OpCase, dtype_name: str, variant: OpVariant, *, num_warmup: int, num_iterations: int, seed: int
) -> Samples:
    """One round of timing."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    copies = [make_inputs(case, dtype, device, seed=seed)]
    input_bytes = compulsory_bytes(copies[0][0], backward=False)
    copies += [make_inputs(case, dtype, device, seed=seed + i) for i in range(1, num_rotated(input_bytes))]

    forwards, forwards_grad, backwards = [], [], []
    for problem, grad_output in copies:
        function = variant.function(problem)
        inputs = (problem.value, problem.locations, problem.weights)
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        output = function(*leaves)
        forwards.append(_no_grad(function, inputs))
        forwards_grad.append(lambda function=function, leaves=leaves: function(*leaves))
        backwards.append(
            lambda output=output, leaves=leaves, grad=grad_output: torch.autograd.grad(
                output, leaves, grad, retain_graph=True
            )
        )
    counts = {"num_warmup": num_warmup, "num_iterations": num_iterations}
    return Samples(
        time_cuda(forwards, **counts),
        time_cuda(forwards_grad, **counts),
        time_cuda(backwards, **counts),
        # elsewhere the queue is full and a call waits for the GPU
        [host_time_us(forwards_grad[0])] if case.kind == "decoder" else [],
    )


def measure_workload(
    case: OpCase,
    dtype_name: str,
    variants: Sequence[OpVariant],
    *,
    rounds: int,
    num_warmup: int,
    num_iterations: int,
    seed: int,
) -> list[OpRow]:
    """Check variants on one workload, then time them in turns, so that drift meets all."""
    rows = [check_or_say_why(case, dtype_name, variant, seed=seed) for variant in variants]
    samples = [Samples([], [], [], []) for _ in variants]
    counts = {"num_warmup": num_warmup, "num_iterations": num_iterations}
    for _ in range(rounds):
        for row, variant, pooled in zip(rows, variants, samples, strict=True):
            if row.status == "ok":
                pooled.extend(time_variant(case, dtype_name, variant, seed=seed, **counts))
                torch.cuda.empty_cache()
    return [
        with_times(row, case, pooled) if row.status == "ok" else row for row, pooled in zip(rows, samples, strict=True)
    ]


def with_times(row: OpRow, case: OpCase, samples: Samples) -> OpRow:
    """The row with medians and percentiles of all rounds."""
    problem, _ = make_inputs(case, DTYPES[row.dtype], torch.device("cuda"), seed=0)
    forward, backward = Timing.of(samples.forward_ms), Timing.of(samples.backward_ms)
    return replace(
        row,
        forward_ms=forward.median_ms,
        forward_p20_ms=forward.p20_ms,
        forward_p80_ms=forward.p80_ms,
        forward_grad_ms=Timing.of(samples.forward_grad_ms).median_ms,
        backward_ms=backward.median_ms,
        backward_p20_ms=backward.p20_ms,
        backward_p80_ms=backward.p80_ms,
        host_forward_us=min(samples.host_forward_us, default=None),
        forward_gbps=compulsory_bytes(problem, backward=False) / forward.median_ms / 1e6,
        backward_gbps=compulsory_bytes(problem, backward=True) / backward.median_ms / 1e6,
    )


def _no_grad(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return call


def _forward_backward(problem: Problem, grad_output: Tensor, variant: OpVariant) -> tuple[Tensor, Gradients]:
    leaves = [tensor.detach().requires_grad_() for tensor in (problem.value, problem.locations, problem.weights)]
    output = variant.function(problem)(*leaves)
    value, locations, weights = torch.autograd.grad(output, leaves, grad_output)
    return output.detach(), Gradients(value, locations, weights, None)


def _parity_failures(variant: OpVariant, dtype: torch.dtype, device: torch.device) -> list[str]:
    problem, grad_output = random_problem(_PARITY, dtype, device=device)
    output, gradients = _forward_backward(problem, grad_output, variant)
    accumulator = "float32" if variant.deterministic else variant.accumulator
    comparisons = compare(problem, grad_output, output, gradients, accumulator)  # type: ignore[arg-type]
    return [str(comparison) for comparison in comparisons if not comparison.passed]


def _with_errors(row: OpRow, problem: Problem, grad_output: Tensor, variant: OpVariant) -> OpRow:
    """Errors against float64, on the first image."""
    value, shapes, locations, weights, *_ = problem
    first = Problem(value[:1], shapes, locations[:1], weights[:1])
    output, gradients = _forward_backward(first, grad_output[:1], variant)
    exact_output, exact = run_reference(first, grad_output[:1], torch.float64)

    def error(given: Tensor | None, right: Tensor | None) -> float | None:
        return None if given is None or right is None else error_ratio(given, right)

    return replace(
        row,
        error_output=error_ratio(output, exact_output),
        error_grad_value=error(gradients.value, exact.value),
        error_grad_locations=error(gradients.locations, exact.locations),
        error_grad_weights=error(gradients.weights, exact.weights),
    )


def _peak_mib(problem: Problem, grad_output: Tensor, variant: OpVariant) -> float:
    _forward_backward(problem, grad_output, variant)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _forward_backward(problem, grad_output, variant)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _deformops(problem: Problem, accumulator: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The peer's Triton kernels through their public function."""
    from deformops.registry import Backend, msda

    sizes = torch.tensor(problem.spatial_shapes, device=problem.value.device)
    areas = sizes.prod(1)
    starts = areas.cumsum(0) - areas

    def function(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        flat = weights.flatten(3)
        output = msda(value, sizes, starts, locations, flat, backend=Backend.TRITON, fp32acc=accumulator == "float32")
        return output.flatten(2)

    return function
