"""Deformable decoder: queries attend to each other, then to a few points of the memory."""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from detr.boxes import inverse_sigmoid
from detr.models.encoder import reset_transformer_parameters
from detr.models.feed_forward import FeedForward
from detr.models.levels import LevelGeometry
from detr.models.value_projection import project_together
from ops import MSDeformAttn


class DecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention, feed-forward; post-norm (recipe, section 6.2)."""

    def __init__(
        self,
        cross_attn: MSDeformAttn,
        *,
        d_model: int = 256,
        num_heads: int = 8,
        dim_feedforward: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, num_heads, dropout=dropout, batch_first=True)
        self.self_attn_dropout = nn.Dropout(dropout)
        self.self_attn_norm = nn.LayerNorm(d_model)
        self.cross_attn = cross_attn
        self.cross_attn_dropout = nn.Dropout(dropout)
        self.cross_attn_norm = nn.LayerNorm(d_model)
        self.ffn = FeedForward(d_model, dim_feedforward, dropout)

    def forward(
        self,
        queries: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        value: Tensor,
        levels: LevelGeometry,
    ) -> Tensor:
        """(N, Lq, C) -> (N, Lq, C).

        Args:
            queries: (N, Lq, C), content.
            query_pos: (N, Lq, C), position.
            reference_points: (N, Lq, L, 2 or 4), of each padded level.
            value: (N, S, C), the memory through `cross_attn.value_proj`.
            levels: Geometry of the batch.
        """
        placed = queries + query_pos
        update, _ = self.self_attn(placed, placed, queries, need_weights=False)
        queries = self.self_attn_norm(queries + self.self_attn_dropout(update))
        update = self.cross_attn.attend(
            queries + query_pos,
            reference_points,
            value,
            levels.spatial_shapes,
            valid_sizes=levels.valid_sizes,
        )
        queries = self.cross_attn_norm(queries + self.cross_attn_dropout(update))
        return self.ffn(queries)


class Decoder(nn.Module):
    """`num_layers` copies of `layer`, and the boxes that come out after each.

    Args:
        layer: Copied, with Xavier weights for each copy and equal one-dimensional parameters.
        num_layers: Layers K.
        with_box_refine: Each layer looks at the box of the layer before it. Otherwise all layers look at the
            first reference points.
        look_forward_twice: With refinement: the box of a layer sends its gradient on to the layer before
            (DINO, arXiv 2203.03605). Off in the original.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        num_layers: int,
        *,
        with_box_refine: bool = False,
        look_forward_twice: bool = False,
    ) -> None:
        super().__init__()
        if look_forward_twice and not with_box_refine:
            raise ValueError("look_forward_twice=true needs with_box_refine=true: without it boxes are not passed on")
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.with_box_refine = with_box_refine
        self.look_forward_twice = look_forward_twice
        reset_transformer_parameters(self)

    def forward(
        self,
        queries: Tensor,
        query_pos: Tensor,
        reference_points: Tensor,
        memory: Tensor,
        levels: LevelGeometry,
        box_heads: Sequence[nn.Module],
    ) -> tuple[Tensor, Tensor]:
        """Decode the queries.

        Args:
            queries: (N, Lq, C), content.
            query_pos: (N, Lq, C), position.
            reference_points: (N, Lq, 2) points or (N, Lq, 4) boxes in [0, 1] of the valid image, float32.
            memory: (N, S, C).
            levels: Geometry of the batch.
            box_heads: K modules (N, Lq, C) -> (N, Lq, 4), one a layer; may be one module K times.

        Returns:
            States (K, N, Lq, C), and boxes (K, N, Lq, 4) as (cx, cy, w, h) in [0, 1], float32.
        """
        states, boxes = [], []
        # what the next layer looks at, and what the next box is predicted from: the same values, but the
        # second keeps its gradient under look_forward_twice
        looked_at = predicted_from = reference_points
        layers = cast(Sequence[DecoderLayer], self.layers)
        values = project_together(memory, [layer.cross_attn.value_proj for layer in layers])
        for layer, value, box_head in zip(layers, values, box_heads, strict=True):
            scale = levels.valid_ratios.repeat(1, 1, looked_at.shape[-1] // 2)  # (N, L, 2 or 4)
            queries = layer(queries, query_pos, looked_at[:, :, None] * scale[:, None], value, levels)
            box = refine_boxes(box_head(queries), predicted_from)
            states.append(queries)
            boxes.append(box)
            if self.with_box_refine:
                looked_at = box.detach()
                predicted_from = box if self.look_forward_twice else looked_at
        return torch.stack(states), torch.stack(boxes)


def refine_boxes(delta: Tensor, reference_points: Tensor) -> Tensor:
    """Boxes (N, Lq, 4) in [0, 1] at `delta` (N, Lq, 4) from `reference_points` (N, Lq, 2 or 4), in logits.

    All float32 at least.

    A point gives only the centre; width and height then are the delta's own (recipe, section 6.11).
    """
    reference = inverse_sigmoid(reference_points)
    if reference.shape[-1] == 4:
        return (delta + reference).sigmoid()
    return torch.cat((delta[..., :2] + reference, delta[..., 2:]), dim=-1).sigmoid()
