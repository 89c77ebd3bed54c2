"""Where low precision stops: coordinates, positions and losses are float32 at least."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or untouched if it is float64.

    bfloat16 holds 8 bits: a box centre would move by a third of a cell on a 167-pixel level. Everything
    geometric therefore leaves the autocast dtype here, at a visible place.
    """
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def linear_in_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """`linear(x)` computed in float32 at least, also inside autocast and for a model in a half dtype.

    For the few outputs that are coordinates: reference points and boxes.
    """
    device = x.device.type
    # some device types have no autocast, and raise where it is switched off
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    context = torch.autocast(device, enabled=False) if is_on else nullcontext()
    with context:
        bias = None if linear.bias is None else at_least_float32(linear.bias)
        return F.linear(at_least_float32(x), at_least_float32(linear.weight), bias)
