"""The operator in torch's dispatcher: schema, shapes, autograd, autocast and vmap. The only place of torch.library.

Written with `Library.define` and autograd functions, which costs the host half of what `custom_op` does a call.
"""

from typing import Any

import torch
from torch import Tensor

from ops.msda.config import Accumulator
from ops.msda.dispatch import backward_backend, forward_backend
from ops.msda.problem import Problem
from ops.msda.reference import ms_deform_attn_fused_reference, ms_deform_attn_reference
from ops.msda.sampling import gather_sample, second_gradients

_INPUTS = (
    "Tensor value, SymInt[] spatial_shapes, Tensor locations, Tensor weights, "
    "Tensor? reference_points, Tensor? valid_sizes, str backend, str accumulator, bool deterministic"
)
_LIBRARY = torch.library.Library("msda", "DEF")
# spatial_shapes is H, W of each level, flat. With reference_points the fused form: locations are offsets and
# weights logits.
_LIBRARY.define(f"attend({_INPUTS}) -> Tensor")
# needs: gradients of value, locations, weights, reference_points; those not needed come back empty
_LIBRARY.define(f"attend_backward(Tensor grad_output, {_INPUTS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)")
_NUM_INPUTS = 9


def attend(problem: Problem, backend: str, accumulator: Accumulator, deterministic: bool) -> Tensor:
    """Run a kernel backend, differentiably.

    Args:
        problem: What to compute.
        backend: A name that `resolve` returned, not `reference`.
        accumulator, deterministic: See `KernelConfig`.

    Returns:
        (N, Lq, M * D) in the dtype of value.
    """
    value, shapes, locations, weights, reference_points, valid_sizes = problem
    tensors = (value, locations, weights, reference_points)
    is_direct = not torch.compiler.is_compiling() and not _someone_dispatches(value.device.type)
    if is_direct and not _any_requires_grad(tensors) and _is_plain(tensors):
        return forward_backend(backend, problem).forward(problem)  # type: ignore[no-any-return]
    sides = [side for pair in shapes for side in pair]
    inputs = (value, sides, locations, weights, reference_points, valid_sizes, backend, accumulator, deterministic)
    if is_direct:
        return _attend_autograd(*inputs)
    return torch.ops.msda.attend.default(*inputs)  # type: ignore[no-any-return]


def _someone_dispatches(device_type: str) -> bool:
    """Whether anything above autograd wants to see the call: autocast or torch.func.

    If not, the dispatcher would only take time, which a decoder's calls feel. Modes and subclasses below autograd are
    looked for there.
    """
    return torch.is_autocast_enabled(device_type) or torch._C._are_functorch_transforms_active()


# ---- kernels


def _problem(
    value: Tensor,
    sides: list[int],
    locations: Tensor,
    weights: Tensor,
    reference_points: Tensor | None,
    valid_sizes: Tensor | None,
) -> Problem:
    shapes = tuple(zip(sides[::2], sides[1::2], strict=True))
    return Problem(value, shapes, locations, weights, reference_points, valid_sizes)


def _attend(*inputs: Any) -> Tensor:
    problem = _problem(*inputs[:6])
    return forward_backend(inputs[6], problem).forward(problem)  # type: ignore[no-any-return]


def _attend_backward(grad_output: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    problem = _problem(*inputs[:6])
    backend, accumulator, deterministic, needs = inputs[6:]
    module = backward_backend(backend, problem, accumulator, deterministic)
    gradients = module.backward(problem, grad_output, tuple(needs), accumulator, deterministic)
    # a schema has no optional results
    return tuple(grad_output.new_empty(0) if grad is None else grad for grad in gradients)


def _attend_fake(*inputs: Any) -> Tensor:
    value, locations = inputs[0], inputs[2]
    N, _, M, D = value.shape
    return value.new_empty((N, locations.shape[1], M * D))  # type: ignore[no-any-return]


def _attend_backward_fake(grad_output: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    value, _, locations, weights, reference_points = inputs[:5]
    needs = inputs[9]
    tensors = (value, locations, weights, reference_points)
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else grad_output.new_empty(0)
        for tensor, need in zip(tensors, needs, strict=True)
    )


# ---- autograd


def _run_attend(inputs: tuple[Any, ...]) -> Tensor:
    if _is_plain((inputs[0], inputs[2], inputs[3], inputs[4])):
        return _attend(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.msda.attend.default(*inputs)  # type: ignore[no-any-return]


def _run_attend_backward(inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if _is_plain((inputs[0], inputs[1], inputs[3], inputs[4], inputs[5])):
        return _attend_backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.msda.attend_backward.default(*inputs)  # type: ignore[no-any-return]


def _is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nothing below autograd wants to see the call: no subclass, no tracing, no mode.

    Another pass through the dispatcher costs the host as much as the launch, which a decoder's calls feel.
    """
    return torch._C._len_torch_dispatch_stack() == 0 and all(
        tensor is None or type(tensor) in _PLAIN for tensor in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _any_requires_grad(tensors: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        value, sides, locations, weights, reference_points, valid_sizes, *options = inputs
        ctx.save_for_backward(value, locations, weights, reference_points, valid_sizes)
        ctx.sides, ctx.options = sides, options
        return _run_attend(inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        value, locations, weights, reference_points, valid_sizes = ctx.saved_tensors
        needs = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4)]
        inputs = (
            grad_output,
            value,
            ctx.sides,
            locations,
            weights,
            reference_points,
            valid_sizes,
            *ctx.options,
            needs,
        )
        gradients = (
            torch.ops.msda.attend_backward.default(*inputs) if torch.is_grad_enabled() else _run_attend_backward(inputs)
        )
        grads = [grad if need else None for grad, need in zip(gradients, needs, strict=True)]
        return grads[0], None, *grads[1:], *(None,) * (_NUM_INPUTS - 5)


class _AttendBackward(torch.autograd.Function):
    """The gradients, differentiable through the reference's formula: slow, and only for double backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        grad_output, value, sides, locations, weights, reference_points, valid_sizes, *_ = inputs
        ctx.save_for_backward(grad_output, value, locations, weights, reference_points, valid_sizes)
        ctx.sides, ctx.needs = sides, inputs[-1]
        ctx.set_materialize_grads(False)
        return _run_attend_backward(inputs)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        grad_output, value, locations, weights, reference_points, valid_sizes = ctx.saved_tensors
        shapes = _problem(value, ctx.sides, locations, weights, None, None).spatial_shapes
        inputs = [value, locations, weights]
        if reference_points is not None:
            inputs.append(reference_points)

        def function(*inputs: Tensor) -> Tensor:
            if reference_points is None:
                return ms_deform_attn_reference(inputs[0], shapes, *inputs[1:], sampler=gather_sample)
            value, offsets, logits, points = inputs
            return ms_deform_attn_fused_reference(
                value, shapes, points, offsets, logits, valid_sizes, sampler=gather_sample
            )

        wanted = tuple(grad if need else None for grad, need in zip(incoming, ctx.needs, strict=True))[: len(inputs)]
        gradients = second_gradients(function, tuple(inputs), grad_output, wanted)
        grad_grad_output, *grads = gradients
        grads += [None] * (4 - len(grads))
        return grad_grad_output, grads[0], None, *grads[1:], *(None,) * (_NUM_INPUTS - 5 + 1)


def _attend_autograd(*inputs: Any) -> Tensor:
    if _any_requires_grad((inputs[0], inputs[2], inputs[3], inputs[4])):
        return _Attend.apply(*inputs)  # type: ignore[no-any-return]
    return _run_attend(inputs)


def _attend_backward_autograd(*inputs: Any) -> tuple[Tensor, ...]:
    if _any_requires_grad((inputs[0], inputs[1], inputs[3], inputs[4], inputs[5])):
        return _AttendBackward.apply(*inputs)  # type: ignore[no-any-return]
    return _run_attend_backward(inputs)


# ---- autocast


def _attend_autocast(device_type: str) -> Any:
    def kernel(value: Tensor, *inputs: Any) -> Tensor:
        # the value as a matrix product would take it; coordinates and softmax keep what precision they have, since
        # the kernels compute in float32 whatever comes
        if value.dtype != torch.float64:
            value = value.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            return torch.ops.msda.attend.default(value, *inputs)  # type: ignore[no-any-return]

    return kernel


# ---- vmap


def _fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension moved into the batch, which comes first."""
    if tensor is None:
        return None
    tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _attend_vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
    folded = list(inputs)
    for i in (0, 2, 3, 4, 5):
        folded[i] = _fold(inputs[i], in_dims[i], info.batch_size)
    output = torch.ops.msda.attend.default(*folded)
    return output.unflatten(0, (info.batch_size, -1)), 0


def _attend_backward_vmap(
    info: Any, in_dims: tuple[Any, ...], *inputs: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    folded = list(inputs)
    for i in (0, 1, 3, 4, 5, 6):
        folded[i] = _fold(inputs[i], in_dims[i], info.batch_size)
    gradients = torch.ops.msda.attend_backward.default(*folded)
    needs = inputs[-1]
    unfolded = tuple(
        grad.unflatten(0, (info.batch_size, -1)) if need else grad for grad, need in zip(gradients, needs, strict=True)
    )
    return unfolded, tuple(0 if need else None for need in needs)


# ---- registration

for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", _attend, _key)
    _LIBRARY.impl("attend_backward", _attend_backward, _key)
_LIBRARY.impl("attend", _attend_autograd, "Autograd")
_LIBRARY.impl("attend_backward", _attend_backward_autograd, "Autograd")
_LIBRARY.impl("attend", _attend_autocast("cuda"), "AutocastCUDA")
_LIBRARY.impl("attend", _attend_autocast("cpu"), "AutocastCPU")
torch.library.register_fake("msda::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("msda::attend_backward", _attend_backward_fake, lib=_LIBRARY)
torch.library.register_vmap("msda::attend", _attend_vmap, lib=_LIBRARY)
torch.library.register_vmap("msda::attend_backward", _attend_backward_vmap, lib=_LIBRARY)
