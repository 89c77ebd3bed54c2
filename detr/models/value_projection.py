"""The value projections of all decoder layers, which read one memory."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


def project_together(memory: Tensor, projections: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each of K `projections` (C to C) of one memory (N, S, C): K tensors (N, S, C), contiguous.

    The memory is cast once, and its gradient is one matrix product over all layers, which sums in float32; layers
    on their own would cast it K times and add up K gradients of its size. Under autocast in autocast's dtype.
    """
    weights: list[Tensor] = [projection.weight for projection in projections]
    biases: list[Tensor] = [projection.bias for projection in projections]
    device = memory.device.type
    # autocast does not look into functions that bring their own backward pass
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        memory = memory.to(dtype)
        weights, biases = [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
    values: tuple[Tensor, ...] = _ProjectTogether.apply(memory, *weights, *biases)
    return values


class _ProjectTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, memory: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        num_layers = len(parameters) // 2
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        ctx.save_for_backward(memory, *weights)
        return tuple(F.linear(memory, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_values: Tensor) -> tuple[Tensor, ...]:
        memory, *weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = torch.cat(grad_values, dim=-1).flatten(0, 1)  # (N*S, K*C)
        grad_memory = (grad @ torch.cat(weights)).view_as(memory)
        grad_weights = (grad.T @ memory.flatten(0, 1)).chunk(len(weights))  # K of (C, C)
        # in float32 at least, as matrix products sum
        grad_biases = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype)
        return grad_memory, *grad_weights, *grad_biases.chunk(len(weights))
