"""What value gradients are added up in, float32 or the dtype of value, and how: reductions or a compare-and-swap loop.

GPUs before Hopper have no reduction of bfloat16 and emulate it by such a loop; forced here on any GPU. The experiment
adds and does nothing else; the shipped kernels, which round less often, stand beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detr.benchmark.ops.inputs import DTYPES, OpCase, make_inputs
from ops.msda.config import Accumulator
from ops.msda.dispatch import backend_module
from ops.msda.problem import Gradients, Problem
from ops.testing import Case as ParityCase
from ops.testing import error_ratio, expectation, random_problem, run_reference
from ops.timing import Timing, time_cuda

EXPERIMENT = "atomics"
# one map of so many cells a side; a power of two, so that cell centres are exact locations
_CONTENTION_SIDE = 128
# as many as the GPU runs at a time: a loop that all lose but one takes a time that grows with their square
_CONTENTION_QUERIES, _CONTENTION_POINTS, _NUM_HEADS = 2048, 4, 8
_PARITY = ParityCase(N=2, Lq=1065, M=8, shapes=((20, 39), (13, 17), (7, 8), (2, 4)))
# a loop under contention may take a thousand times longer than a reduction
_BUDGET_MS, _LEAST_ITERATIONS = 500.0, 3


@dataclass(frozen=True)
class Sums:
    """How a value gradient is added up.

    Attributes:
        kernel: atomics (the experiment) | cuda | triton (shipped).
        accumulator: float32 | native.
        emulated: Through a compare-and-swap loop; for the experiment only.
    """

    kernel: str
    accumulator: Accumulator = "float32"
    emulated: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in (EXPERIMENT, "cuda", "triton") or (self.emulated and self.kernel != EXPERIMENT):
            raise ValueError(
                f"sums are of {EXPERIMENT}, cuda or triton, emulated of {EXPERIMENT} alone; got {self.kernel!r} with "
                f"emulated={self.emulated}"
            )


@dataclass(frozen=True)
class AccumulatorRow:
    """One way to add on one workload; the order of the fields is the order of the columns.

    Attributes:
        workload: encoder | decoder | contention.
        batch_size: Images.
        dtype: Of value and its gradient.
        num_cells: Contention only: the cells that all samples fall in; 1 is all on one.
        kernel, accumulator, emulated: See `Sums`.
        status: `ok`, or why there are no numbers.
        verified: Whether the error bound was met before timing.
        value_grad_ms: Clearing, adding and rounding: median with 20th and 80th percentiles.
        error: Relative norm against float64 on the first image.
        level_errors: The same of each level.
    """

    workload: str
    batch_size: int
    dtype: str
    num_cells: int | None
    kernel: str
    accumulator: str
    emulated: bool
    status: str
    verified: bool | None = None
    value_grad_ms: float | None = None
    value_grad_p20_ms: float | None = None
    value_grad_p80_ms: float | None = None
    error: float | None = None
    level_errors: tuple[float, ...] = ()

    @property
    def place(self) -> tuple[str, int, str, int | None]:
        """What rows must share to be compared."""
        return self.workload, self.batch_size, self.dtype, self.num_cells

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.accumulator}" + (" emulated" if self.emulated else "")


def contention_problem(
    num_cells: int, dtype: torch.dtype, device: torch.device, *, seed: int
) -> tuple[Problem, Tensor]:
    """Samples on cell centres, the same number on each of the first `num_cells` cells of one map.

    A sample adds one row. With as many cells as samples each gets one; with one, that one gets all.
    """
    side, Lq, P, M = _CONTENTION_SIDE, _CONTENTION_QUERIES, _CONTENTION_POINTS, _NUM_HEADS
    if num_cells < 1 or Lq * P % num_cells:
        raise ValueError(f"num_cells must divide the {Lq * P} samples of a head; got {num_cells}")
    generator = torch.Generator(device).manual_seed(seed)
    cells = torch.arange(Lq * P, device=device).view(1, Lq, 1, 1, P) % num_cells
    cells = cells.expand(1, Lq, M, 1, P)
    locations = (torch.stack((cells % side, cells // side), -1).float() + 0.5) / side  # (1, Lq, M, 1, P, 2)
    weights = torch.full(cells.shape, 1 / P, device=device, dtype=dtype)
    value = torch.randn(1, side * side, M, 32, device=device, generator=generator).to(dtype)
    grad_output = torch.randn(1, Lq, M * 32, device=device, generator=generator).to(dtype)
    return Problem(value, ((side, side),), locations, weights), grad_output


def value_gradient(sums: Sums, problem: Problem, grad_output: Tensor) -> Callable[[], Tensor]:
    """The value gradient as a call, (N, S, M, D) in the dtype of value, everything prepared."""
    if sums.kernel == EXPERIMENT:
        from detr.benchmark.findings.point_kernels import AddPoints, Technique

        sum_dtype = torch.float32 if sums.accumulator == "float32" else problem.value.dtype
        return AddPoints(problem, grad_output, Technique(swap=sums.emulated), sum_dtype)
    module = backend_module(sums.kernel)
    needs = (True, False, False, False)

    def call() -> Tensor:
        gradient = module.backward(problem, grad_output, needs, sums.accumulator, False).value
        assert isinstance(gradient, Tensor)
        return gradient

    return call


def missed_bound(sums: Sums, dtype: torch.dtype, device: torch.device) -> str:
    """The comparison with float64 on a small problem, or nothing if the rule of `ops.testing` is met."""
    problem, grad_output = random_problem(_PARITY, dtype, device=device)
    gradient = value_gradient(sums, problem, grad_output)()
    gradients = Gradients(gradient, None, None, None)
    comparisons = expectation(problem, grad_output, sums.accumulator).compare(None, gradients)
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)


def level_errors(given: Tensor, exact: Tensor, problem: Problem) -> tuple[float, ...]:
    """Relative norm of the difference on each level of (N, S, M, D)."""
    areas = [H * W for H, W in problem.spatial_shapes]
    return tuple(
        error_ratio(part, right) for part, right in zip(given.split(areas, 1), exact.split(areas, 1), strict=True)
    )


def measure_place(
    workload: str,
    batch_size: int,
    dtype_name: str,
    num_cells: int | None,
    variants: list[Sums],
    *,
    rounds: int,
    num_iterations: int,
    seed: int,
) -> list[AccumulatorRow]:
    """Check the variants, then time them in turns on one workload."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    if num_cells is None:
        problem, grad_output = make_inputs(OpCase(workload, batch_size), dtype, device, seed=seed)
    else:
        problem, grad_output = contention_problem(num_cells, dtype, device, seed=seed)
    exact = _exact_of_first(problem, grad_output)
    rows: list[AccumulatorRow] = []
    calls: list[Callable[[], Tensor] | None] = []
    for sums in variants:
        row = AccumulatorRow(
            workload, batch_size, dtype_name, num_cells, sums.kernel, sums.accumulator, sums.emulated, "ok"
        )
        missed = missed_bound(sums, dtype, device)
        if missed:
            rows.append(replace(row, status=f"error bound missed: {missed}", verified=False))
            calls.append(None)
            continue
        call = value_gradient(sums, problem, grad_output)
        gradient = call()[:1]
        errors = level_errors(gradient, exact, problem)
        rows.append(replace(row, verified=True, error=error_ratio(gradient, exact), level_errors=errors))
        calls.append(call)
    samples: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for call_or_none, pooled in zip(calls, samples, strict=True):
            if call_or_none is not None:
                pooled += _time(call_or_none, num_iterations)
    return [_with_times(row, pooled) if pooled else row for row, pooled in zip(rows, samples, strict=True)]


def affordable(num_iterations: int, call_ms: float) -> int:
    """How often a call of this length is timed."""
    return max(_LEAST_ITERATIONS, min(num_iterations, int(_BUDGET_MS / max(call_ms, 1e-3))))


def _time(call: Callable[[], Tensor], num_iterations: int) -> list[float]:
    (call_ms,) = time_cuda([call], num_warmup=1, num_iterations=1)
    return time_cuda([call], num_warmup=1, num_iterations=affordable(num_iterations, call_ms))


def _with_times(row: AccumulatorRow, samples_ms: list[float]) -> AccumulatorRow:
    timing = Timing.of(samples_ms)
    return replace(
        row, value_grad_ms=timing.median_ms, value_grad_p20_ms=timing.p20_ms, value_grad_p80_ms=timing.p80_ms
    )


def _exact_of_first(problem: Problem, grad_output: Tensor) -> Tensor:
    """(1, S, M, D) float64."""
    first = problem._replace(value=problem.value[:1], locations=problem.locations[:1], weights=problem.weights[:1])
    gradient = run_reference(first, grad_output[:1], torch.float64)[1].value
    assert gradient is not None
    return gradient
