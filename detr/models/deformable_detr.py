"""The detector as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr.models.backbone import Backbone
from detr.models.decoder import Decoder
from detr.models.encoder import Encoder
from detr.models.heads import DetectionHeads
from detr.models.levels import LevelGeometry
from detr.models.neck import Neck
from detr.models.position_encoding import sine_position_encoding
from detr.models.queries import LearnedQueries
from detr.models.two_stage import ProposalQueries
from detr.structures import DetectorOutput, ImageBatch


class DeformableDETR(nn.Module):
    """Deformable DETR (arXiv 2010.04159), from built parts. `detr.models.deformable_detr` builds them.

    Args:
        backbone: Features of the images.
        neck: Features to L levels of C channels.
        encoder: Over all levels.
        queries: `LearnedQueries` (one-stage) or `ProposalQueries` (two-stage).
        decoder: Over the queries.
        heads: Logits, and the box heads the decoder uses.
        d_model: Channels C.
    """

    def __init__(
        self,
        backbone: Backbone,
        neck: Neck,
        encoder: Encoder,
        queries: LearnedQueries | ProposalQueries,
        decoder: Decoder,
        heads: DetectionHeads,
        *,
        d_model: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = neck
        self.encoder = encoder
        self.queries = queries
        self.decoder = decoder
        self.heads = heads
        self.level_embed = nn.Parameter(torch.empty(len(neck.input_proj), d_model))
        nn.init.normal_(self.level_embed)

    @property
    def num_queries(self) -> int:
        return self.queries.num_queries

    def forward(self, images: ImageBatch) -> DetectorOutput:
        """Detect; see :class:`detr.structures.DetectorOutput` for the shapes."""
        padding_mask = images.padding_mask
        return self.forward_features(self.backbone(images.pixels, padding_mask), padding_mask)

    def forward_features(self, features: Sequence[Tensor], padding_mask: Tensor) -> DetectorOutput:
        """Everything after the backbone.

        Args:
            features: (N, C_i, H_i, W_i), fine to coarse.
            padding_mask: (N, H, W) bool of the images, True = padding.
        """
        maps = self.neck(features)
        levels = LevelGeometry.from_padding_mask(padding_mask, maps)
        d_model = self.level_embed.shape[1]
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], dim=1)  # (N, S, C)
        position = torch.cat(
            [
                sine_position_encoding(mask, d_model) + embed
                for mask, embed in zip(levels.padding_masks, self.level_embed, strict=True)
            ],
            dim=1,
        ).to(memory.dtype)  # (N, S, C); computed in float32, only the sum with the memory is in its dtype
        memory = self.encoder(memory, position, levels)
        if isinstance(self.queries, ProposalQueries):
            initial = self.queries(memory, levels, self.heads)
        else:
            initial = self.queries(memory.shape[0])
        states, boxes = self.decoder(
            initial.queries,
            initial.query_pos,
            initial.reference_points,
            memory,
            levels,
            self.heads.box_heads(),
        )
        return DetectorOutput(self.heads.classify(states), boxes, initial.enc_outputs)
