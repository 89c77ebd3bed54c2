"""The NPU paper's claims on a GPU: ratios to grid_sample, and its techniques switched on one by one.

The ratios are those of `detr.benchmark.ops.measure`; the techniques are in experiment kernels (`point_kernels.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from detr.benchmark.findings.point_kernels import AddPoints, GatherPoints, Technique
from detr.benchmark.ops.inputs import DTYPES, OpCase, make_inputs
from detr.benchmark.ops.row import OpRow
from ops.msda.problem import Gradients, Problem
from ops.testing import Case as ParityCase
from ops.testing import expectation, random_problem
from ops.timing import Timing, time_cuda

Direction = Literal["forward", "backward"]
_PARITY = ParityCase(N=2, Lq=1065, M=8, shapes=((20, 39), (13, 17), (7, 8), (2, 4)))


@dataclass(frozen=True)
class Ratios:
    """How many times faster than something else.

    Attributes:
        forward, backward, total: Time of the other over ours.
    """

    forward: float
    backward: float
    total: float


# over its grid_sample baseline, the last in end-to-end training
CLAIMED = Ratios(5.9, 8.9, 7.3)


@dataclass(frozen=True)
class TechniqueRow:
    """A technique in one direction; the order of the fields is the order of the columns.

    Attributes:
        direction: forward | backward (the value gradient alone).
        dtype: Of value; value gradients are summed in float32.
        batch_size: Images.
        technique: Name of what is on.
        base: Name of what it is compared with: the same without what is new, or plain.
        status: `ok`, or why there are no numbers.
        verified: Whether the error bound was met before timing.
        kernel_ms: Median of the kernel, in the backward direction with the clearing of its sums; with percentiles.
        layout_ms: Median of bringing values into the layout, or sums out of it.
    """

    direction: str
    dtype: str
    batch_size: int
    technique: str
    base: str
    status: str
    verified: bool | None = None
    kernel_ms: float | None = None
    kernel_p20_ms: float | None = None
    kernel_p80_ms: float | None = None
    layout_ms: float | None = None


def ratios(row: OpRow, plain: OpRow) -> Ratios | None:
    """A row against grid_sample on the same workload; None without times of both."""
    times = (row.forward_ms, row.forward_grad_ms, row.backward_ms)
    others = (plain.forward_ms, plain.forward_grad_ms, plain.backward_ms)
    if None in times or None in others:
        return None
    forward, with_grad, backward = (time or 0.0 for time in times)
    other_forward, other_with_grad, other_backward = (time or 0.0 for time in others)
    return Ratios(
        other_forward / forward,
        other_backward / backward,
        (other_with_grad + other_backward) / (with_grad + backward),
    )


def base_of(technique: Technique) -> Technique:
    """What a technique is compared with: a pair with its layout alone, everything else with nothing switched on."""
    only_pair = Technique(head_major=True, pair=True)
    return Technique(head_major=True) if technique == only_pair else Technique()


def measure_techniques(
    direction: Direction,
    techniques: Sequence[Technique],
    dtype_name: str,
    batch_size: int,
    *,
    rounds: int,
    num_iterations: int,
    seed: int,
) -> list[TechniqueRow]:
    """Check the techniques, then time them in turns."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    problem, grad_output = make_inputs(OpCase("encoder", batch_size), dtype, device, seed=seed)
    rows: list[TechniqueRow] = []
    calls: list[tuple[Callable[[], object], Callable[[], object]] | None] = []
    for technique in techniques:
        row = TechniqueRow(direction, dtype_name, batch_size, technique.name, base_of(technique).name, "ok")
        missed = missed_bound(direction, technique, dtype, device)
        if missed:
            rows.append(replace(row, status=f"error bound missed: {missed}", verified=False))
            calls.append(None)
            continue
        rows.append(replace(row, verified=True))
        calls.append(_calls_of(direction, technique, problem, grad_output))
    kernels: list[list[float]] = [[] for _ in rows]
    layouts: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for pair, kernel_ms, layout_ms in zip(calls, kernels, layouts, strict=True):
            if pair is not None:
                kernel_ms += time_cuda([pair[0]], num_warmup=2, num_iterations=num_iterations)
                layout_ms += time_cuda([pair[1]], num_warmup=1, num_iterations=num_iterations)
    return [
        _with_times(row, kernel_ms, layout_ms) if kernel_ms else row
        for row, kernel_ms, layout_ms in zip(rows, kernels, layouts, strict=True)
    ]


def missed_bound(direction: Direction, technique: Technique, dtype: torch.dtype, device: torch.device) -> str:
    """The comparison with float64 on a small problem, or nothing if the rule of `ops.testing` is met."""
    problem, grad_output = random_problem(_PARITY, dtype, device=device)
    output: Tensor | None = None
    gradient: Tensor | None = None
    if direction == "forward":
        output = GatherPoints(problem, technique)()
    else:
        gradient = AddPoints(problem, grad_output, technique, torch.float32)()
    comparisons = expectation(problem, grad_output).compare(output, Gradients(gradient, None, None, None))
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.passed)


def technique_of(options: dict[str, bool]) -> Technique:
    """A technique from its switches.

    Raises:
        ValueError: An unknown one.
    """
    known = {field.name for field in fields(Technique)}
    if not options.keys() <= known:
        raise ValueError(f"a technique has the switches {', '.join(sorted(known))}; got {sorted(options)}")
    return Technique(**options)


def _calls_of(
    direction: Direction, technique: Technique, problem: Problem, grad_output: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The kernel, and the change of layout that it needs."""
    if direction == "forward":
        gather = GatherPoints(problem, technique)
        return gather, gather.lay_out
    adding = AddPoints(problem, grad_output, technique, torch.float32)
    return adding.add, adding.take_back


def _with_times(row: TechniqueRow, kernel_ms: list[float], layout_ms: list[float]) -> TechniqueRow:
    timing = Timing.of(kernel_ms)
    return replace(
        row,
        kernel_ms=timing.median_ms,
        kernel_p20_ms=timing.p20_ms,
        kernel_p80_ms=timing.p80_ms,
        layout_ms=Timing.of(layout_ms).median_ms,
    )
