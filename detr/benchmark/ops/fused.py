"""The fused form of the operator against softmax and sampling locations in eager PyTorch before the same kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from detr.benchmark.ops.inputs import DTYPES, OpCase, compulsory_bytes, make_fused_inputs
from detr.benchmark.ops.measure import OpVariant
from ops import KernelConfig, ms_deform_attn, ms_deform_attn_fused
from ops.msda.problem import Gradients, Problem
from ops.testing import Case as ParityCase
from ops.testing import expectation, random_problem
from ops.timing import Timing, num_rotated, time_cuda

# eager: softmax in float32, as autocast has it; eager_cast: its result cast to the dtype of value besides, as other
# implementations of the operator ask for; eager_deformops: likewise, before the kernels of deformops
FORMS = ("fused", "eager", "eager_cast", "eager_deformops")
_PARITY = ParityCase(N=2, M=8, Lq=3195, shapes=((40, 60), (20, 30), (10, 15), (5, 8)), form=2)


@dataclass(frozen=True)
class FusedRow:
    """A row; the order of the fields is the order of the columns.

    Attributes:
        batch_size: Images.
        dtype: Of value, offsets, logits and gradient.
        backend: cuda | triton.
        form: One of `FORMS`.
        status: `ok`, or why there are no numbers.
        verified: Whether the error bound was met before timing; None for the eager forms.
        step_ms: Forward and backward of value, offsets and logits together: median with 20th and 80th percentiles.
        saved_mib: What autograd keeps from forward to backward, each storage once.
        saved_inputs_mib: The same without value, which every form keeps.
        peak_mib: Allocator's peak over forward and backward above the inputs.
    """

    batch_size: int
    dtype: str
    backend: str
    form: str
    status: str
    verified: bool | None = None
    step_ms: float | None = None
    step_p20_ms: float | None = None
    step_p80_ms: float | None = None
    saved_mib: float | None = None
    saved_inputs_mib: float | None = None
    peak_mib: float | None = None

    @property
    def workload(self) -> tuple[int, str, str]:
        """What rows must share to be compared."""
        return self.batch_size, self.dtype, self.backend


def attend_in_form(form: str, problem: Problem, backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The operator as (value, offsets, logits) -> output, with the reference points of the problem.

    Raises:
        ValueError: An unknown form, or `auto`, which would not say what was measured.
        ImportError: The form needs deformops, which is not installed.
    """
    if form not in FORMS or backend == "auto":
        raise ValueError(f"a row needs a form of {', '.join(FORMS)} and a named backend; got {form!r} and {backend!r}")
    shapes, points = problem.spatial_shapes, problem.reference_points
    assert points is not None
    kernel = KernelConfig(backend)  # type: ignore[arg-type]
    if form == "fused":
        return lambda value, offsets, logits: ms_deform_attn_fused(
            value, shapes, points, offsets, logits, kernel=kernel
        )
    peer = OpVariant("deformops").function(problem) if form == "eager_deformops" else None
    sides = torch.tensor([(W, H) for H, W in shapes], device=points.device, dtype=points.dtype)[:, None]  # (L, 1, 2)
    anchors = points[:, :, None, :, None]  # (N, Lq, 1, L, 1, 2)

    def eager(value: Tensor, offsets: Tensor, logits: Tensor) -> Tensor:
        locations = anchors + offsets / sides  # (N, Lq, M, L, P, 2)
        weights = logits.flatten(-2).softmax(-1, dtype=torch.float32).view(logits.shape)  # (N, Lq, M, L, P)
        if form != "eager":
            weights = weights.to(value.dtype)
        if peer is not None:
            return peer(value, locations, weights)
        return ms_deform_attn(value, shapes, locations, weights, kernel=kernel)

    return eager


class StepInForm:
    """Forward and backward of one form on one set of inputs."""

    def __init__(self, form: str, problem: Problem, grad_output: Tensor, backend: str) -> None:
        self._function = attend_in_form(form, problem, backend)
        inputs = (problem.value, problem.locations, problem.weights)
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        self._grad_output = grad_output

    def forward(self) -> Tensor:
        return self._function(*self.leaves)

    def __call__(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        output = self.forward()
        return output, torch.autograd.grad(output, self.leaves, self._grad_output)


@contextmanager
def recorded_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd keeps for the backward pass of what runs inside, by address."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # held, so that no address is given out twice
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def saved_bytes(step: StepInForm) -> tuple[int, int]:
    """What autograd keeps of a forward pass, with and without value."""
    with recorded_storages() as storages:
        step.forward()
    total = sum(storage.nbytes() for storage in storages.values())
    value = storages.get(step.leaves[0].untyped_storage().data_ptr())
    return total, total - (value.nbytes() if value is not None else 0)


def check_form(case: OpCase, dtype_name: str, backend: str, form: str, *, seed: int) -> FusedRow:
    """A row with memory, not yet timed; a fused kernel that misses its error bound says so in `status`."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    row = FusedRow(case.batch_size, dtype_name, backend, form, "ok")
    if form == "fused":
        missed = _missed_bounds(dtype, device, backend)
        if missed:
            return replace(row, status="error bound missed: " + "; ".join(missed), verified=False)
        row = replace(row, verified=True)
    try:
        step = StepInForm(form, *make_fused_inputs(case, dtype, device, seed=seed), backend)
    except ImportError as error:
        return replace(row, status=f"not run: {error}")
    total, without_value = saved_bytes(step)
    return replace(
        row, saved_mib=total / 2**20, saved_inputs_mib=without_value / 2**20, peak_mib=_peak_bytes(step) / 2**20
    )


def time_form(
    case: OpCase, dtype_name: str, backend: str, form: str, *, num_warmup: int, num_iterations: int, seed: int
) -> list[float]:
    """Milliseconds of forward and backward together, one round."""
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    first = make_fused_inputs(case, dtype, device, seed=seed)
    num_copies = num_rotated(compulsory_bytes(first[0], backward=False))
    copies = [first, *(make_fused_inputs(case, dtype, device, seed=seed + i) for i in range(1, num_copies))]
    steps = [StepInForm(form, problem, grad_output, backend) for problem, grad_output in copies]
    return time_cuda(steps, num_warmup=num_warmup, num_iterations=num_iterations)


def with_step_times(row: FusedRow, samples_ms: list[float]) -> FusedRow:
    """The row with the median and percentiles of all rounds."""
    timing = Timing.of(samples_ms)
    return replace(row, step_ms=median(samples_ms), step_p20_ms=timing.p20_ms, step_p80_ms=timing.p80_ms)


def _missed_bounds(dtype: torch.dtype, device: torch.device, backend: str) -> list[str]:
    problem, grad_output = random_problem(_PARITY, dtype, device=device)
    output, (value, offsets, logits) = StepInForm("fused", problem, grad_output, backend)()
    comparisons = expectation(problem, grad_output).compare(output.detach(), Gradients(value, offsets, logits, None))
    return [str(comparison) for comparison in comparisons if not comparison.passed]


def _peak_bytes(step: StepInForm) -> int:
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before
