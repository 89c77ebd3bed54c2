"""Backbone features to the transformer's levels, all of one width."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Neck(nn.Module):
    """One 1x1 convolution a backbone feature, then stride-2 3x3 ones for coarser levels; group norm after each.

    The first extra level looks at the raw last feature, each further one at the level before it (recipe,
    section 6.1). Xavier weights, zero biases.

    Args:
        in_channels: Channels of the backbone features, fine to coarse.
        d_model: Channels C of every level.
        num_levels: Levels L. With fewer levels than features, the finest features go unused: 1 is the paper's
            single-scale model on C5.
        num_groups: Groups of the group norm.

    Raises:
        ValueError: Fewer levels than features.
    """

    def __init__(
        self, in_channels: Sequence[int], d_model: int = 256, num_levels: int = 4, num_groups: int = 32
    ) -> None:
        super().__init__()
        if num_levels < 1:
            raise ValueError(f"num_levels must be at least 1; got {num_levels}")
        in_channels = in_channels[-num_levels:]
        self.num_features = len(in_channels)
        convolutions = [nn.Conv2d(channels, d_model, kernel_size=1) for channels in in_channels]
        channels = in_channels[-1]
        for _ in range(num_levels - len(in_channels)):
            convolutions.append(nn.Conv2d(channels, d_model, kernel_size=3, stride=2, padding=1))
            channels = d_model
        self.input_proj = nn.ModuleList(
            nn.Sequential(convolution, nn.GroupNorm(num_groups, d_model)) for convolution in convolutions
        )
        for convolution in convolutions:
            nn.init.xavier_uniform_(convolution.weight)
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)
        # as the features come, and so the gradients of these weights: otherwise each is copied, and DDP warns that its
        # buckets have other strides
        self.input_proj.to(memory_format=torch.channels_last)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Levels (N, C, H_l, W_l), fine to coarse."""
        features = features[-self.num_features :]
        levels = [projection(feature) for projection, feature in zip(self.input_proj, features, strict=False)]
        source = features[-1]
        for projection in self.input_proj[self.num_features :]:
            levels.append(projection(source))
            source = levels[-1]
        return levels
