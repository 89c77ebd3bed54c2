"""Running the candidates of a shape class on the GPU: right first, then fast."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from detr.benchmark.ops.inputs import OpCase, compulsory_bytes, make_fused_inputs
from detr.benchmark.ops.tune import Candidate
from ops.msda.config import Accumulator
from ops.msda.cuda.compiler import CompileError
from ops.msda.cuda.launch import LaunchError
from ops.msda.dispatch import backend_module
from ops.msda.problem import Gradients, Problem
from ops.msda.tuning.shape_class import DECODER_PAIRS, Direction, Regime, ShapeClass, Sums, shape_class
from ops.testing import Case as ParityCase
from ops.testing import expectation, random_problem
from ops.timing import num_rotated, time_cuda

_PARITY_SHAPES = ((40, 60), (20, 30), (10, 15), (5, 8))
_PARITY_CELLS = sum(H * W for H, W in _PARITY_SHAPES)
# the samples of points that have no gradient of their own, as in an encoder
_NEEDS = (True, True, True, False)
_NUM_WARMUP = 2


def tune_case(regime: Regime, case: OpCase, multiprocessors: int) -> OpCase:
    """A workload of a regime on a device: `case` with the queries and images that put it there."""
    boundary = DECODER_PAIRS * multiprocessors
    if regime == "encoder":
        return replace(case, kind="encoder")
    if regime == "other":
        num_queries = max(case.num_queries, -(-4 * boundary // (case.num_heads * case.batch_size)))
        return replace(case, kind="decoder", num_queries=num_queries)
    num_queries = max(min(case.num_queries, (boundary - 1) // case.num_heads), 1)
    batch_size = max(min(case.batch_size, (boundary - 1) // (case.num_heads * num_queries)), 1)
    return replace(case, kind="decoder", num_queries=num_queries, batch_size=batch_size)


class KernelBench:
    """A shape class on a device, in the fused form with offsets and logits of the dtype of value.

    Args:
        cases: From `tune_case`, all of one class: launch shapes are timed over all of them, since what suits one spread
            of the offsets may be slower at the others.
        dtype: Of value.
        direction, sums: See `ShapeClass`.
        multiprocessors: Of the device.

    Attributes:
        kind: The class of the timed workload.
    """

    def __init__(
        self,
        cases: Sequence[OpCase],
        dtype: torch.dtype,
        direction: Direction,
        sums: Sums | None,
        *,
        device: torch.device,
        multiprocessors: int,
        seed: int,
    ) -> None:
        self._direction = direction
        self._accumulator: Accumulator = "native" if sums == "native" else "float32"
        self._deterministic = sums == "fixed"
        self._inputs = [_rotated_inputs(case, dtype, device, seed) for case in cases]
        kinds = {
            shape_class(
                direction,
                dtype,
                problem.value.shape,
                problem.Lq,
                problem.spatial_shapes,
                cases[0].num_points,
                sums,
                multiprocessors,
            )
            for (problem, _), *_ in self._inputs
        }
        if len(kinds) != 1:
            raise ValueError(f"one bench times one shape class; its cases are of {len(kinds)}")
        self.kind: ShapeClass = kinds.pop()
        num_queries = {"encoder": _PARITY_CELLS, "decoder": 300, "other": _PARITY_CELLS - 1}[self.kind.regime]
        parity = ParityCase(
            N=2,
            Lq=num_queries,
            M=cases[0].num_heads,
            D=cases[0].head_dim,
            P=cases[0].num_points,
            shapes=_PARITY_SHAPES,
            form=2,
            padded=True,
        )
        self._parity = random_problem(parity, dtype, device=device, seed=seed)
        self._expected = expectation(*self._parity, self._accumulator)

    def failure(self, candidate: Candidate) -> str | None:
        """Why a candidate is out: it does not compile or launch, or misses its bound against float64."""
        errors: tuple[type[Exception], ...] = (CompileError, LaunchError, ValueError)
        if candidate.backend == "triton":
            errors += (_triton_error(),)
        try:
            result = self._call(candidate, *self._parity)()
            again = self._call(candidate, *self._parity)() if self._deterministic else result
        except errors as error:
            return f"does not run: {str(error).splitlines()[0]}"
        output, gradients = _results(result)
        missed = [str(comparison) for comparison in self._expected.compare(output, gradients) if not comparison.passed]
        if missed:
            return f"wrong: {'; '.join(missed)}"
        if any(a is not None and not torch.equal(a, b) for a, b in zip(result, again, strict=True)):
            return "wrong: two runs differ in deterministic mode"
        return None

    def time_ms(self, candidate: Candidate, num_iterations: int) -> list[float]:
        """Milliseconds of each call, the mean over the cases."""
        samples_ms = [
            time_cuda(
                [self._call(candidate, *one) for one in inputs], num_warmup=_NUM_WARMUP, num_iterations=num_iterations
            )
            for inputs in self._inputs
        ]
        return [sum(calls) / len(calls) for calls in zip(*samples_ms, strict=True)]

    def _call(self, candidate: Candidate, problem: Problem, grad_output: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """The pass as a call that returns its results."""
        module, launch_shapes = backend_module(candidate.backend), candidate.launch_shapes
        if self._direction == "forward":
            return lambda: (module.forward(problem, launch_shapes),)
        return lambda: module.backward(
            problem, grad_output, _NEEDS, self._accumulator, self._deterministic, launch_shapes
        )


def _rotated_inputs(case: OpCase, dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Problem, Tensor]]:
    """Problems with gradients of their outputs, so many that together they pass the L2."""
    first = make_fused_inputs(case, dtype, device, seed=seed)
    num_copies = num_rotated(compulsory_bytes(first[0], backward=False))
    return [first, *(make_fused_inputs(case, dtype, device, seed=seed + i) for i in range(1, num_copies))]


def _results(result: tuple[Tensor, ...]) -> tuple[Tensor | None, Gradients]:
    if isinstance(result, Gradients):
        return None, result
    return result[0], Gradients(None, None, None, None)


def _triton_error() -> type[Exception]:
    """What every error of Triton's is; only a machine where it can run has it."""
    from triton.errors import TritonError

    return TritonError
