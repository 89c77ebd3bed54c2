# mypy: disallow-untyped-defs=False
"""The Triton kernel of `relu_dropout`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 elements of a half dtype, 16 bytes, a thread and run
_BLOCK = 1024


@triton.jit
def _relu_dropout_kernel(x_ptr, seed_ptr, y_ptr, numel, p, BLOCK: tl.constexpr):
    """A program takes 4 runs of BLOCK elements, one for each of Philox's four numbers."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr)
    r0, r1, r2, r3 = tl.rand4x(seed, (program * BLOCK + lanes).to(tl.int32))
    first = program * (4 * BLOCK) + lanes
    scale = 1 / (1 - p)
    _run(x_ptr, y_ptr, first, r0, numel, p, scale)
    _run(x_ptr, y_ptr, first + BLOCK, r1, numel, p, scale)
    _run(x_ptr, y_ptr, first + 2 * BLOCK, r2, numel, p, scale)
    _run(x_ptr, y_ptr, first + 3 * BLOCK, r3, numel, p, scale)


@triton.jit
def _run(x_ptr, y_ptr, offsets, uniform, numel, p, scale):
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    # a product, not a choice, with the factor: NaN and infinity stay visible as in PyTorch's dropout
    positive = tl.where(x <= 0, 0.0, x)
    y = positive * tl.where(uniform < p, 0.0, scale)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def launch_relu_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """dropout(relu(x)) of a tensor on the device, contiguous.

    Args:
        x: Any shape; float32, bfloat16 or float16.
        seed: (1,) int64 on the device.
        p: In [0, 1).
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel() > 0:
        grid = (triton.cdiv(x.numel(), 4 * _BLOCK),)
        _relu_dropout_kernel[grid](x, seed, y, x.numel(), p, BLOCK=_BLOCK)
    return y
