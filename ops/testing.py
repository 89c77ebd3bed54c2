"""Inputs and the error rule for tests of the operator and for the gate of its benchmarks.

The rule: against the reference in float64, a kernel may be off by at most 2 times (output) or 3 times (gradients) what
the yardstick is off. The yardstick is the reference in float32 on the same rounded inputs, rounded to each result's
dtype. For a `native` accumulator the value gradient's yardstick adds float32 contributions into a buffer of the
native dtype, one rounding an addend.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.msda.config import Accumulator
from ops.msda.dispatch import backend_module
from ops.msda.problem import Gradients, Problem
from ops.msda.reference import (
    attention_weights_from_logits,
    ms_deform_attn_fused_reference,
    ms_deform_attn_reference,
    sampling_locations_from_offsets,
)

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
# below this a yardstick is luck: one rounding of float32
_LEAST_ERROR = 6e-8


@dataclass(frozen=True)
class Case:
    """Sizes of a problem.

    Attributes:
        form: 0 for locations and weights, 2 for offsets around points, 4 for offsets in boxes.
        padded: With valid sizes smaller than the maps.
        spread: How far samples go beyond the maps, as a fraction of them; offsets in pixels for the fused form.
    """

    N: int = 2
    Lq: int = 37
    M: int = 2
    D: int = 32
    P: int = 4
    shapes: tuple[tuple[int, int], ...] = ((9, 13), (5, 7), (2, 3))
    form: int = 0
    padded: bool = False
    spread: float = 0.2

    @property
    def S(self) -> int:
        return sum(H * W for H, W in self.shapes)

    def __str__(self) -> str:
        name = f"N{self.N}-Lq{self.Lq}-M{self.M}-D{self.D}-L{len(self.shapes)}-P{self.P}-form{self.form}"
        return name + ("-padded" if self.padded else "")


def random_problem(
    case: Case,
    dtype: torch.dtype,
    *,
    weights_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Problem, Tensor]:
    """A problem and a gradient of its output, (N, Lq, M * D).

    Args:
        dtype: Of value and grad_output.
        weights_dtype: Of weights, logits and offsets; None for `dtype`. Locations and reference points are float32.
    """
    generator = torch.Generator(device).manual_seed(seed)
    L = len(case.shapes)
    points = (case.N, case.Lq, case.M, L, case.P)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    value = normal(case.N, case.S, case.M, case.D).to(dtype)
    grad_output = normal(case.N, case.Lq, case.M * case.D).to(dtype)
    weights = normal(*points).to(weights_dtype or dtype)
    if case.form == 0:
        locations = uniform(*points, 2) * (1 + 2 * case.spread) - case.spread
        weights = weights.float().flatten(-2).softmax(-1).view(points).to(weights_dtype or dtype)
        return Problem(value, case.shapes, locations, weights), grad_output
    reference_points = uniform(case.N, case.Lq, L, case.form)
    offsets = (normal(*points, 2) * 10 * case.spread).to(weights_dtype or dtype)
    valid_sizes = None
    if case.padded:
        sides = torch.tensor(case.shapes, device=device)
        valid_sizes = (uniform(case.N, L, 2) * sides).to(torch.int64) + 1
    return Problem(value, case.shapes, offsets, weights, reference_points, valid_sizes), grad_output


def run_reference(problem: Problem, grad_output: Tensor, dtype: torch.dtype) -> tuple[Tensor, Gradients]:
    """Output and gradients of the reference, everything in `dtype`."""
    inputs = [problem.value, problem.locations, problem.weights]
    if problem.reference_points is not None:
        inputs.append(problem.reference_points)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    if problem.reference_points is None:
        output = ms_deform_attn_reference(inputs[0], problem.spatial_shapes, *inputs[1:])
    else:
        value, offsets, logits, points = inputs
        output = ms_deform_attn_fused_reference(
            value, problem.spatial_shapes, points, offsets, logits, problem.valid_sizes
        )
    gradients = list(torch.autograd.grad(output, inputs, grad_output.to(dtype)))
    if problem.reference_points is None:
        return output.detach(), Gradients(gradients[0], gradients[1], gradients[2], None)
    return output.detach(), Gradients(*gradients)


def run_backend(
    name: str,
    problem: Problem,
    grad_output: Tensor,
    accumulator: Accumulator = "float32",
    deterministic: bool = False,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
) -> tuple[Tensor, Gradients]:
    """Output and gradients of a kernel backend, without autograd around it; `needs` as its `backward` takes them."""
    module = backend_module(name)
    if problem.reference_points is None:
        needs = (*needs[:3], False)
    return module.forward(problem), module.backward(problem, grad_output, needs, accumulator, deterministic)


def native_value_gradient(problem: Problem, grad_output: Tensor) -> Tensor:
    """grad_value by `index_add_` of float32 contributions into a buffer of the dtype of value."""
    value, shapes, locations, weights, reference_points, valid_sizes = problem
    if reference_points is not None:
        locations = sampling_locations_from_offsets(reference_points, locations, shapes)
        weights = attention_weights_from_logits(weights)
    N, S, M, D = value.shape
    Lq = locations.shape[1]
    buffer = torch.zeros_like(value).view(N * S * M, D)
    grads = grad_output.float().view(N, Lq, M, 1, D)
    batch = torch.arange(N, device=value.device).view(N, 1, 1, 1)
    head = torch.arange(M, device=value.device).view(M, 1)
    start = 0
    for level, (H, W) in enumerate(shapes):
        valid_h, valid_w = torch.tensor(H), torch.tensor(W)
        if valid_sizes is not None:
            valid_h, valid_w = valid_sizes[:, level].view(N, 2, 1, 1, 1).unbind(1)
        x = locations[:, :, :, level, :, 0].float() * W - 0.5  # (N, Lq, M, P)
        y = locations[:, :, :, level, :, 1].float() * H - 0.5
        x0, y0 = x.floor(), y.floor()
        for row, y_weight in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
            for column, x_weight in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
                inside = (row >= 0) & (row < valid_h) & (column >= 0) & (column < valid_w)
                weight = torch.where(inside, weights[:, :, :, level].float() * y_weight * x_weight, 0)
                cell = torch.where(inside, start + row * W + column, 0).long()
                rows = ((batch * S + cell) * M + head).flatten()
                addends = (weight[..., None] * grads).reshape(-1, D)
                if buffer.is_cuda:
                    buffer.index_add_(0, rows, addends.to(value.dtype))
                else:
                    # index_add_ on the CPU sums 16-bit dtypes in float32
                    buffer.index_put_((rows,), addends.to(value.dtype), accumulate=True)
        start += H * W
    return buffer.view_as(value)


@dataclass(frozen=True)
class Comparison:
    """One result against the rule.

    Attributes:
        name: `output` or the gradient's name.
        error: Relative norm of the difference to the reference in float64.
        yardstick: The same of the yardstick.
        factor: How many times the yardstick the error may be.
    """

    name: str
    error: float
    yardstick: float
    factor: float

    @property
    def passed(self) -> bool:
        # false for NaN
        return self.error <= self.factor * max(self.yardstick, _LEAST_ERROR)

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.name}: error {self.error:.2e}, yardstick {self.yardstick:.2e} ({verdict})"


@dataclass(frozen=True)
class Expectation:
    """What the results of a problem are held against.

    Attributes:
        output, gradients: Of the reference in float64.
        rounded_output, rounded: The yardsticks, still to be rounded to each result's dtype.
    """

    output: Tensor
    gradients: Gradients
    rounded_output: Tensor
    rounded: Gradients

    def compare(self, output: Tensor | None, gradients: Gradients) -> list[Comparison]:
        """Every result of a kernel against the rule; those that are None are left out."""
        comparisons = []
        if output is not None:
            rounded = self.rounded_output.to(output.dtype)
            comparisons.append(_compare("output", output, self.output, rounded, OUTPUT_FACTOR))
        for name, given, right, yardstick in zip(
            Gradients._fields, gradients, self.gradients, self.rounded, strict=True
        ):
            if given is not None and right is not None and yardstick is not None:
                comparisons.append(_compare(f"grad {name}", given, right, yardstick.to(given.dtype), GRADIENT_FACTOR))
        return comparisons


def expectation(problem: Problem, grad_output: Tensor, accumulator: Accumulator = "float32") -> Expectation:
    """Exact results and yardsticks of a problem, for any number of kernels to be compared with."""
    exact_output, exact = run_reference(problem, grad_output, torch.float64)
    rounded_output, rounded = run_reference(problem, grad_output, torch.float32)
    if accumulator == "native" and problem.value.dtype != torch.float32:
        rounded = rounded._replace(value=native_value_gradient(problem, grad_output))
    return Expectation(exact_output, exact, rounded_output, rounded)


def compare(
    problem: Problem,
    grad_output: Tensor,
    output: Tensor,
    gradients: Gradients,
    accumulator: Accumulator = "float32",
) -> list[Comparison]:
    """Every result of a kernel against the rule; gradients that are None are left out."""
    return expectation(problem, grad_output, accumulator).compare(output, gradients)


def error_ratio(given: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; of two zeros, 0."""
    difference = float((given.double() - right.double()).norm())
    size = float(right.double().norm())
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _compare(name: str, given: Tensor, right: Tensor, yardstick: Tensor, factor: float) -> Comparison:
    return Comparison(name, error_ratio(given, right), error_ratio(yardstick, right), factor)
