"""Bilinear sampling that can be differentiated twice.

Both functions sample `values` (K, D, H, W) at `grid` (K, Lq, P, 2) as (x, y), [-1, 1] from border to border, with
half-pixel centres and zeros outside: `torch.nn.functional.grid_sample` with align_corners=False. Returns (K, D, Lq, P).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sample(values: Tensor, grid: Tensor) -> Tensor:
    """Through `grid_sample`, whose own backward cannot be differentiated again."""
    if torch.is_grad_enabled() and (values.requires_grad or grid.requires_grad):
        return _GridSample.apply(values, grid)  # type: ignore[no-any-return]
    return _grid_sample(values, grid)


def gather_sample(values: Tensor, grid: Tensor) -> Tensor:
    """Through four gathers: slower and larger, differentiable any number of times, deterministic on CUDA."""
    K, D, H, W = values.shape
    _, Lq, P, _ = grid.shape
    x = ((grid[..., 0] + 1) * W - 1) / 2
    y = ((grid[..., 1] + 1) * H - 1) / 2
    x0, y0 = x.detach().floor(), y.detach().floor()
    flat = values.flatten(2)  # (K, D, H*W)
    output = values.new_zeros((K, D, Lq, P))
    for row, y_weight in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
        for column, x_weight in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            index = torch.where(inside, row * W + column, 0).long()  # (K, Lq, P)
            corner = flat.gather(2, index.flatten(1)[:, None].expand(-1, D, -1)).view(K, D, Lq, P)
            weight = torch.where(inside, y_weight * x_weight, 0)
            output = output + corner * weight[:, None]
    return output


def _grid_sample(values: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(values, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


class _GridSample(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, grid: Tensor) -> Tensor:
        return _grid_sample(values, grid)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        needs_values, needs_grid = ctx.needs_input_grad
        grad_values, grad_grid = _GridSampleBackward.apply(grad_output, *ctx.saved_tensors, needs_values)
        return grad_values if needs_values else None, grad_grid if needs_grid else None


class _GridSampleBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad_output: Tensor, values: Tensor, grid: Tensor, needs_values: bool) -> tuple[Tensor | None, Tensor]:
        return torch.ops.aten.grid_sampler_2d_backward(  # type: ignore[no-any-return]
            grad_output, values, grid, 0, 0, False, [needs_values, True]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.needs_values = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad_grad_values: Tensor | None, grad_grad_grid: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        grad_output, values, grid = ctx.saved_tensors
        incoming = (grad_grad_values if ctx.needs_values else None, grad_grad_grid)
        gradients = second_gradients(
            lambda values, grid: gather_sample(values, grid), (values, grid), grad_output, incoming
        )
        return (*gradients, None)


def second_gradients(
    function: Any,
    inputs: tuple[Tensor, ...],
    grad_output: Tensor,
    incoming: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Differentiate the gradients of `function` once more.

    Args:
        function: Differentiable at least twice.
        inputs: Its arguments.
        grad_output: What its backward was given.
        incoming: Gradients of the gradients of `inputs`; None where there is none.

    Returns:
        Gradients of `grad_output` and of each of `inputs`.
    """
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        # an alias each, so that the graph of the inputs themselves is not walked
        variables = [
            tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
            for tensor in (grad_output, *inputs)
        ]
        first = torch.autograd.grad(
            function(*variables[1:]), variables[1:], variables[0], create_graph=True, allow_unused=True
        )
        pairs = [(g, i) for g, i in zip(first, incoming, strict=True) if g is not None and i is not None]
        if not pairs:
            return (None,) * len(variables)
        return torch.autograd.grad(
            [pair[0] for pair in pairs],
            variables,
            [pair[1] for pair in pairs],
            create_graph=keep,
            allow_unused=True,
        )
