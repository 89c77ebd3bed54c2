"""Sine position encodings, in float32 whatever the autocast dtype: padded cells reach 3e6 radians."""

import math

import torch
from torch import Tensor


def sine_position_encoding(padding_mask: Tensor, d_model: int, *, temperature: float = 10000.0) -> Tensor:
    """Position of each cell among the valid ones, as sines and cosines (recipe, section 6.8).

    Args:
        padding_mask: (N, H, W) bool, True = padding.
        d_model: Channels C, a multiple of 4.
        temperature: Longest wavelength over 2 pi.

    Returns:
        (N, H*W, C) float32; the first half encodes y, the second x.
    """
    valid = ~padding_mask
    # float32 at least: a cumulative sum in a half dtype would stop counting
    y = valid.cumsum(1, dtype=torch.float32)  # (N, H, W)
    x = valid.cumsum(2, dtype=torch.float32)
    y = (y - 0.5) / (y[:, -1:, :] + 1e-6)
    x = (x - 0.5) / (x[:, :, -1:] + 1e-6)
    encoded = encode_coordinates(torch.stack((y, x), dim=-1), d_model // 2, temperature=temperature)
    return encoded.flatten(1, 2)  # (N, H*W, C)


def encode_coordinates(coordinates: Tensor, num_features: int, *, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines of coordinates, one after the other.

    Args:
        coordinates: (..., K), 1 spans the image.
        num_features: Channels a coordinate, even.

    Returns:
        (..., K * num_features); of each coordinate, sine and cosine alternate.
    """
    exponent = torch.arange(num_features // 2, dtype=coordinates.dtype, device=coordinates.device)
    wavelength = temperature ** (2 * exponent / num_features)
    angle = (coordinates * (2 * math.pi))[..., None] / wavelength  # (..., K, num_features / 2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-3)
