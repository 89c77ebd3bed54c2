"""Does the order in which queries are dispatched matter? (GPU paper: no order differs from linear.)

Two kernels: the shipped one, whose queries are permuted before the clock starts, and a point-parallel one, which takes
the order as an argument and gives its programs their queries by it. The orders of one case are timed in turns, each
repeat in an order of its own drawing, and compared with linear repeat by repeat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from detr.benchmark.findings.orders import ORDERS, dispatch_order
from detr.benchmark.findings.paired import compare_paired, holm
from detr.benchmark.ops.inputs import DTYPES, OpCase, make_inputs
from ops.msda.dispatch import backend_module
from ops.msda.problem import Gradients, Problem
from ops.testing import Case as ParityCase
from ops.testing import expectation, random_problem

ALPHA = 0.05
SHIPPED, POINT_PARALLEL = "cuda", "point_parallel"
# strides 8 to 128 of an image of 800 x 1333
LEVELS = ((100, 167), (50, 84), (25, 42), (13, 21), (7, 11))
_PARITY_LEVELS = ((19, 13), (9, 7), (5, 4), (2, 3), (1, 2))


@dataclass(frozen=True)
class OrderCase:
    """One kernel on one problem.

    Attributes:
        kernel: cuda (shipped) | point_parallel.
        direction: forward | backward; backward for the shipped kernel only.
        dtype: Of value.
        batch_size: Images.
        num_levels: The first so many of `LEVELS`.
        num_points: A level.
    """

    kernel: str
    direction: str
    dtype: str
    batch_size: int
    num_levels: int
    num_points: int

    def __post_init__(self) -> None:
        if (self.kernel, self.direction) not in (
            (SHIPPED, "forward"),
            (SHIPPED, "backward"),
            (POINT_PARALLEL, "forward"),
        ):
            raise ValueError(
                f"orders are timed in cuda forward, cuda backward and point_parallel forward; got {self.kernel} "
                f"{self.direction}"
            )


@dataclass(frozen=True)
class OrderRow:
    """An order in one case; the order of the fields is the order of the columns.

    Attributes:
        kernel, direction, dtype, batch_size, num_levels, num_points: See `OrderCase`.
        order: One of `ORDERS`.
        status: `ok`, or why there are no numbers.
        verified: Whether the result met its error bound in this order before it was timed.
        median_ms: Over all repeats.
        ratio: Median over repeats of the time over linear's.
        p_value: Of the paired test against linear, alone.
        p_holm: Corrected for all comparisons of the run.
    """

    kernel: str
    direction: str
    dtype: str
    batch_size: int
    num_levels: int
    num_points: int
    order: str
    status: str
    verified: bool | None = None
    median_ms: float | None = None
    ratio: float | None = None
    p_value: float | None = None
    p_holm: float | None = None

    @property
    def distinguishable(self) -> bool:
        """From linear, with all comparisons of the run counted."""
        return self.p_holm is not None and self.p_holm < ALPHA


def permuted(problem: Problem, order: Tensor) -> Problem:
    """The same problem with its queries in another order."""
    return problem._replace(
        locations=problem.locations[:, order].contiguous(), weights=problem.weights[:, order].contiguous()
    )


def make_calls(
    case: OrderCase, problem: Problem, grad_output: Tensor, orders: dict[str, Tensor]
) -> dict[str, Callable[[], object]]:
    """One call an order, everything prepared."""
    if case.kernel == POINT_PARALLEL:
        return {name: _point_parallel(problem, order) for name, order in orders.items()}
    return {name: _shipped(case, problem, grad_output, order) for name, order in orders.items()}


def missed_bound(case: OrderCase, *, order: str, device: torch.device) -> str:
    """The comparison with float64 on a small problem of the same levels and points, or nothing if it is met."""
    shapes = _PARITY_LEVELS[: case.num_levels]
    S = sum(H * W for H, W in shapes)
    small = ParityCase(N=2, Lq=S, M=8, P=case.num_points, shapes=shapes)
    problem, grad_output = random_problem(small, DTYPES[case.dtype], device=device)
    places = torch.from_numpy(dispatch_order(order, shapes)).to(device)
    result = make_calls(case, problem, grad_output, {order: places})[order]()
    if case.kernel == SHIPPED and case.direction == "forward":
        assert isinstance(result, Tensor)
        result = result[:, places.argsort()]
    if isinstance(result, Gradients):
        inverse = places.argsort()
        assert result.locations is not None
        assert result.weights is not None
        result = result._replace(locations=result.locations[:, inverse], weights=result.weights[:, inverse])
        comparisons = expectation(problem, grad_output).compare(None, result)
    else:
        assert isinstance(result, Tensor)
        comparisons = expectation(problem, grad_output).compare(result, Gradients(None, None, None, None))
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)


def measure_case(
    case: OrderCase, *, num_repeats: int, num_calls: int, seed: int, orders: Sequence[str] = ORDERS
) -> list[OrderRow]:
    """Check, then time the orders of one case; `p_holm` is still to be filled.

    Args:
        num_repeats: Paired timings of each order.
        num_calls: Calls a timing.
        seed: Of inputs, the random order and the turns.
    """
    device = torch.device("cuda")
    settings = (case.kernel, case.direction, case.dtype, case.batch_size, case.num_levels, case.num_points)
    rows = []
    for order in orders:
        missed = missed_bound(case, order=order, device=device)
        status = f"error bound missed: {missed}" if missed else "ok"
        rows.append(OrderRow(*settings, order, status, verified=not missed))
    if any(row.status != "ok" for row in rows):
        return rows
    samples = time_in_turns(
        _calls_of(case, orders, device, seed=seed), num_repeats=num_repeats, num_calls=num_calls, seed=seed
    )
    return with_comparisons(rows, samples)


def with_comparisons(rows: Sequence[OrderRow], samples: dict[str, list[float]]) -> list[OrderRow]:
    """Rows of one case with their times and comparisons with linear."""
    done = []
    for row in rows:
        paired = compare_paired(samples[row.order], samples["linear"])
        p_value = None if row.order == "linear" else paired.p_value
        median_ms = float(np.median(samples[row.order]))
        done.append(replace(row, median_ms=median_ms, ratio=paired.ratio, p_value=p_value))
    return done


def corrected(rows: Sequence[OrderRow]) -> list[OrderRow]:
    """Rows of a whole run with Holm's correction for all of their comparisons."""
    compared = [row for row in rows if row.p_value is not None]
    adjusted = dict(zip(map(id, compared), holm([row.p_value or 0.0 for row in compared]), strict=True))
    return [replace(row, p_holm=adjusted.get(id(row))) for row in rows]


def time_in_turns(
    calls: dict[str, Callable[[], object]], *, num_repeats: int, num_calls: int, seed: int
) -> dict[str, list[float]]:
    """Milliseconds a call; in each repeat the alternatives come in another random order, so that drift meets all."""
    rng = np.random.default_rng(seed)
    for call in calls.values():
        call()
        call()
    names = list(calls)
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(num_repeats):
        for index in rng.permutation(len(names)):
            name = names[index]
            # what the alternative before has left in the caches is not for the clock
            calls[name]()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(num_calls):
                calls[name]()
            end.record()
            marks.append((name, start, end))
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name, start, end in marks:
        samples[name].append(start.elapsed_time(end) / num_calls)
    return samples


def _calls_of(
    case: OrderCase, orders: Sequence[str], device: torch.device, *, seed: int
) -> dict[str, Callable[[], object]]:
    shapes = LEVELS[: case.num_levels]
    op_case = OpCase("encoder", case.batch_size, num_points=case.num_points)
    problem, grad_output = make_inputs(op_case, DTYPES[case.dtype], device, seed=seed, shapes=shapes)
    places = {name: torch.from_numpy(dispatch_order(name, shapes, seed=seed)).to(device) for name in orders}
    return make_calls(case, problem, grad_output, places)


def _shipped(case: OrderCase, problem: Problem, grad_output: Tensor, order: Tensor) -> Callable[[], object]:
    module = backend_module("cuda")
    turned, grads = permuted(problem, order), grad_output[:, order].contiguous()
    if case.direction == "forward":
        return lambda: module.forward(turned)
    needs = (True, True, True, False)
    return lambda: module.backward(turned, grads, needs, "float32", False)


def _point_parallel(problem: Problem, order: Tensor) -> Callable[[], object]:
    # Triton is for Linux, and this module is not
    from detr.benchmark.findings.tile_kernel import TileForward, Tiling

    num_samples = problem.weights.shape[3] * problem.weights.shape[4]
    block_p = 1 << (num_samples - 1).bit_length()
    return TileForward(problem, Tiling(1, block_p), order)
