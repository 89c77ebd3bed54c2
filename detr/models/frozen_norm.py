"""Batch norm with statistics and affine parameters that do not change."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class FrozenBatchNorm(nn.Module):
    """A batch norm as the fixed affine map it is in evaluation mode; all its tensors are buffers.

    The map is computed in float32 and rounded once, to the dtype of its input: under autocast the activations
    after it stay in the half dtype, where `x * scale + bias` with float32 buffers would turn them, and every
    residual sum after them, into float32.

    Args:
        norm: The layer to freeze; its numbers are taken over. timm's layers bring their activation along
            (`act`, `drop`), which stays.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise ValueError("freeze_norm=true needs batch norms with running statistics; set freeze_norm=false")
        self.eps = norm.eps
        mean, var = norm.running_mean, norm.running_var
        weight = torch.ones_like(mean) if norm.weight is None else norm.weight
        bias = torch.zeros_like(mean) if norm.bias is None else norm.bias
        for name, tensor in (("weight", weight), ("bias", bias), ("running_mean", mean), ("running_var", var)):
            self.register_buffer(name, tensor.detach().clone())
        self.drop = getattr(norm, "drop", nn.Identity())
        self.act = getattr(norm, "act", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...), in the dtype of `x`."""
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return self.act(self.drop(x))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


def freeze_batch_norms(module: nn.Module) -> nn.Module:
    """Replace every batch norm in `module` by a `FrozenBatchNorm`, in place; returns it, or what replaces it."""
    if isinstance(module, _BatchNorm):
        return FrozenBatchNorm(module)
    for name, child in module.named_children():
        setattr(module, name, freeze_batch_norms(child))
    return module
