"""The geometry of a batch's feature levels, made once a batch and shared by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LevelGeometry:
    """Sizes and padding of L levels.

    Attributes:
        spatial_shapes: L pairs (H, W), Python ints: nothing downstream reads the device for them.
        padding_masks: L tensors (N, H_l, W_l) bool, True = padding.
        valid_sizes: (N, L, 2) int64, valid cells (h, w) of each image and level.
        valid_ratios: (N, L, 2) float32, valid share (w, h) of each image and level.
    """

    spatial_shapes: tuple[tuple[int, int], ...]
    padding_masks: tuple[Tensor, ...]
    valid_sizes: Tensor
    valid_ratios: Tensor

    @classmethod
    def from_padding_mask(cls, padding_mask: Tensor, levels: Sequence[Tensor]) -> "LevelGeometry":
        """Geometry of `levels` (N, C, H_l, W_l) for a batch with `padding_mask` (N, H, W)."""
        spatial_shapes = tuple((level.shape[-2], level.shape[-1]) for level in levels)
        full = padding_mask[None].to(torch.float32)
        masks = tuple(F.interpolate(full, size=shape, mode="nearest")[0] > 0.5 for shape in spatial_shapes)
        valid_sizes = torch.stack(
            [torch.stack(((~mask[:, :, 0]).sum(1), (~mask[:, 0, :]).sum(1)), dim=-1) for mask in masks], dim=1
        )  # (N, L, 2) as (h, w)
        ratios = [
            torch.stack((valid_sizes[:, i, 1] / W, valid_sizes[:, i, 0] / H), dim=-1)
            for i, (H, W) in enumerate(spatial_shapes)
        ]
        return cls(spatial_shapes, masks, valid_sizes, torch.stack(ratios, dim=1))

    def encoder_reference_points(self) -> Tensor:
        """Centre of every cell on every level (N, S, L, 2), float32 (x, y) of each padded level.

        A cell's centre is taken relative to the valid part of its level, then scaled to the valid part of the
        level that is looked at (recipe, section 6.9).
        """
        points = []
        for level, (H, W) in enumerate(self.spatial_shapes):
            device = self.valid_ratios.device
            y = (torch.arange(H, dtype=torch.float32, device=device) + 0.5)[None]  # (1, H)
            x = (torch.arange(W, dtype=torch.float32, device=device) + 0.5)[None]
            y = y / (self.valid_ratios[:, level, 1, None] * H)  # (N, H)
            x = x / (self.valid_ratios[:, level, 0, None] * W)
            grid = torch.stack((x[:, None, :].expand(-1, H, -1), y[:, :, None].expand(-1, -1, W)), dim=-1)
            points.append(grid.flatten(1, 2))  # (N, H*W, 2)
        return torch.cat(points, dim=1)[:, :, None] * self.valid_ratios[:, None]
