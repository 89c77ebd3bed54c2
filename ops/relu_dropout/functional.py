"""`relu_dropout` and its place in autograd.

torch.compile fuses a ReLU with the dropout behind it, but draws a fresh block of four random numbers for every single
element and keeps two masks for the backward pass. The kernel uses all four numbers of a block, and the output is all
that is kept: it is zero exactly where the gradient is.
"""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ops.arguments import require_tensor

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def relu_dropout(x: Tensor, p: float, *, training: bool) -> Tensor:
    """dropout(relu(x)), the same distribution as PyTorch's, not the same random numbers.

    On CUDA a Triton kernel; elsewhere, in float64 and for p = 1, PyTorch's two operators.

    Args:
        x: Any shape, a floating dtype.
        p: Probability in [0, 1] of dropping an element.
        training: False drops nothing.

    Returns:
        Like `x`: 0 where x <= 0 or dropped, else x / (1 - p). NaN stays NaN.

    Raises:
        TypeError: `x` is no tensor.
        ValueError: `p` is not in [0, 1].
    """
    require_tensor("x", x)
    if not 0 <= p <= 1:
        raise ValueError(f"relu_dropout needs a probability 0 <= p <= 1; got p={p}")
    if not training or p == 0:
        return x.relu()
    if p == 1 or not x.is_cuda or x.dtype not in _KERNEL_DTYPES or not _HAS_TRITON:
        return F.dropout(x.relu(), p)
    # drawn on the device from PyTorch's generator: seeds, checkpoints of its state and CUDA graphs work as ever
    seed = torch.randint(2**31 - 1, (1,), device=x.device)
    output: Tensor = _relu_dropout(x, seed, p)
    return output


@torch.library.custom_op("deformable_detr::relu_dropout", mutates_args=(), device_types="cuda")
def _relu_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    from ops.relu_dropout.kernel import launch_relu_dropout

    return launch_relu_dropout(x, seed, p)


@_relu_dropout.register_fake
def _(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_output(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.p = inputs[2]  # type: ignore[attr-defined]


def _backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor, None, None]:
    (output,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return masked_gradient(grad_output, output, ctx.p), None, None  # type: ignore[attr-defined]


def masked_gradient(grad_output: Tensor, output: Tensor, p: float) -> Tensor:
    """Gradient of the input from the output: what was kept is what is not zero. Plain operators, so that
    torch.compile fuses them with what follows."""
    return grad_output.masked_fill(output == 0, 0) * (1 / (1 - p))


_relu_dropout.register_autograd(_backward, setup_context=_save_output)
