"""No timing without parity: a kernel meets its error bound on this machine before it is measured."""

import torch

from ops import KernelConfig, ms_deform_attn_fused
from ops.msda.problem import Gradients, Problem
from ops.testing import Case, compare, random_problem

_VALUE_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kernel_is_verified(kernel: KernelConfig, precision: str, device: torch.device) -> bool | None:
    """Compare a kernel with the reference in float64 by the rule of `ops.testing`, in both forms of references.

    Args:
        kernel: A named backend.
        precision: Name of the step's precision, which decides the dtype of the kernel's value.
        device: Where it will be timed.

    Returns:
        True, or None for the reference, which is what kernels are compared with.

    Raises:
        ValueError: `auto`, which would not say what was measured.
        RuntimeError: The kernel misses its bound; the message holds every comparison.
    """
    if kernel.backend == "auto":
        raise ValueError("a benchmark row needs a named backend, such as kernel=triton; got kernel=auto")
    if kernel.backend == "reference":
        return None
    for form in (2, 4):
        case = Case(N=2, Lq=131, M=8, D=32, P=4, shapes=((19, 13), (9, 7), (5, 4), (2, 3)), form=form, padded=True)
        problem, grad_output = random_problem(case, _VALUE_DTYPES[precision], device=device)
        comparisons = compare(problem, grad_output, *_run(problem, grad_output, kernel), kernel.accumulator)
        if not all(comparison.passed for comparison in comparisons):
            raise RuntimeError(
                f"kernel={kernel.backend} accumulator={kernel.accumulator} misses its error bound in {precision}, so "
                f"it is not timed: {'; '.join(map(str, comparisons))}"
            )
    return True


def _run(problem: Problem, grad_output: torch.Tensor, kernel: KernelConfig) -> tuple[torch.Tensor, Gradients]:
    """Output and gradients of the fused operator."""
    assert problem.reference_points is not None
    tensors = (problem.value, problem.reference_points, problem.locations, problem.weights)
    value, points, offsets, logits = (tensor.detach().requires_grad_() for tensor in tensors)
    output = ms_deform_attn_fused(
        value, problem.spatial_shapes, points, offsets, logits, valid_sizes=problem.valid_sizes, kernel=kernel
    )
    value_grad, points_grad, offsets_grad, logits_grad = torch.autograd.grad(
        output, (value, points, offsets, logits), grad_output
    )
    return output.detach(), Gradients(value_grad, offsets_grad, logits_grad, points_grad)
