"""Deformable encoder: every cell of every level attends to a few points of all levels."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr.models.feed_forward import FeedForward
from detr.models.levels import LevelGeometry
from ops import MSDeformAttn


class EncoderLayer(nn.Module):
    """Deformable self-attention, then feed-forward; post-norm (recipe, section 6.2)."""

    def __init__(
        self,
        self_attn: MSDeformAttn,
        *,
        d_model: int = 256,
        dim_feedforward: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_dropout = nn.Dropout(dropout)
        self.self_attn_norm = nn.LayerNorm(d_model)
        self.ffn = FeedForward(d_model, dim_feedforward, dropout)

    def forward(self, memory: Tensor, position: Tensor, reference_points: Tensor, levels: LevelGeometry) -> Tensor:
        """(N, S, C) -> (N, S, C); arguments as in :class:`Encoder`."""
        update = self.self_attn(
            memory + position, reference_points, memory, levels.spatial_shapes, valid_sizes=levels.valid_sizes
        )
        return self.ffn(self.self_attn_norm(memory + self.self_attn_dropout(update)))


class Encoder(nn.Module):
    """`num_layers` copies of `layer`, with Xavier weights of their own.

    One-dimensional parameters start equal in all copies, as in the original.

    Attributes:
        recompute: In training, keep only what goes into a layer and run it again in the backward pass: less memory
            for more time. `trainer.recompute` sets it.
    """

    def __init__(self, layer: EncoderLayer, num_layers: int) -> None:
        super().__init__()
        self.recompute = False
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        reset_transformer_parameters(self)

    def forward(self, memory: Tensor, position: Tensor, levels: LevelGeometry) -> Tensor:
        """Encode the flattened levels.

        Args:
            memory: (N, S, C), levels one after the other.
            position: (N, S, C), position encoding plus level embedding.
            levels: Geometry of the batch.

        Returns:
            (N, S, C).
        """
        reference_points = levels.encoder_reference_points()
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                # random numbers repeat, so that dropout drops the same
                memory = checkpoint(layer, memory, position, reference_points, levels, use_reentrant=False)
            else:
                memory = layer(memory, position, reference_points, levels)
        return memory


def reset_transformer_parameters(module: nn.Module) -> None:
    """Xavier-uniform for every weight with more than one dimension, then MSDeformAttn's own initialisation."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    for child in module.modules():
        if isinstance(child, MSDeformAttn):
            child.reset_parameters()
