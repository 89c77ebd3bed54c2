"""Queries chosen from the encoder's own proposals (Deformable DETR, appendix A.4)."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from detr.models.heads import DetectionHeads
from detr.models.levels import LevelGeometry
from detr.models.position_encoding import encode_coordinates
from detr.models.queries import InitialQueries
from detr.structures import LayerOutput

ProposalScore = Literal["binary", "max_class"]

# side of a level-0 proposal, in images; each coarser level doubles it
BASE_PROPOSAL_SIZE = 0.05


class ProposalQueries(nn.Module):
    """Scores a box at every token and makes queries of the best (recipe, section 6.12).

    Args:
        num_queries: Proposals that become queries.
        d_model: Channels C.
        proposal_score: What ranks a proposal: `binary` takes the logit of channel 0, which the criterion
            trains as objectness (the original); `max_class` takes the largest logit.
        exclude_padding: Never choose a padded or border token. Off in the original, where all such tokens share
            one score and can fill the queries (recipe, quirk Q3).
    """

    def __init__(
        self,
        num_queries: int,
        d_model: int,
        *,
        proposal_score: ProposalScore = "binary",
        exclude_padding: bool = False,
    ) -> None:
        super().__init__()
        if proposal_score not in get_args(ProposalScore):
            raise ValueError(
                f"proposal_score must be one of {', '.join(get_args(ProposalScore))}; got {proposal_score!r}"
            )
        if num_queries < 1:
            raise ValueError(f"num_queries must be at least 1; got {num_queries}")
        self.num_queries = num_queries
        self.d_model = d_model
        self.proposal_score = proposal_score
        self.exclude_padding = exclude_padding
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        self.pos_trans = nn.Linear(2 * d_model, 2 * d_model)
        self.pos_trans_norm = nn.LayerNorm(2 * d_model)
        for linear in (self.enc_output, self.pos_trans):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, memory: Tensor, levels: LevelGeometry, heads: DetectionHeads) -> InitialQueries:
        """Queries from `memory` (N, S, C).

        Raises:
            ValueError: The memory holds fewer tokens than `num_queries`.
        """
        num_tokens = memory.shape[1]
        if num_tokens < self.num_queries:
            raise ValueError(
                f"num_queries={self.num_queries} proposals were asked of {num_tokens} encoder tokens "
                f"(levels {levels.spatial_shapes}); use larger images, finer levels or fewer queries"
            )
        proposals, valid = _grid_proposals(levels)
        features = self.enc_output_norm(self.enc_output(memory.masked_fill(~valid[..., None], 0)))
        logits = heads.class_embed[-1](features)  # (N, S, num_classes)
        # a proposal that is not valid sits at the far corner, with no gradient through its box
        box_logits = heads.bbox_embed[-1](features) + proposals
        enc_outputs = LayerOutput(logits, box_logits.sigmoid())

        score = logits[..., 0] if self.proposal_score == "binary" else logits.amax(-1)
        if self.exclude_padding:
            score = score.masked_fill(~valid, -torch.inf)
        chosen = score.topk(self.num_queries, dim=1).indices  # (N, Lq)
        chosen_logits = box_logits.gather(1, chosen[..., None].expand(-1, -1, 4)).detach()
        reference_points = chosen_logits.sigmoid()
        encoded = encode_coordinates(reference_points, self.d_model // 2)  # (N, Lq, 2*C)
        encoded = encoded.to(self.pos_trans.weight.dtype)
        query_pos, queries = self.pos_trans_norm(self.pos_trans(encoded)).chunk(2, dim=-1)
        return InitialQueries(queries, query_pos, reference_points, enc_outputs)


def _grid_proposals(levels: LevelGeometry) -> tuple[Tensor, Tensor]:
    """One square a token: box logits (N, S, 4) float32, inf where not valid, and which are valid (N, S)."""
    boxes = []
    for level, (H, W) in enumerate(levels.spatial_shapes):
        device = levels.valid_sizes.device
        y = (torch.arange(H, dtype=torch.float32, device=device) + 0.5) / levels.valid_sizes[:, level, 0, None]
        x = (torch.arange(W, dtype=torch.float32, device=device) + 0.5) / levels.valid_sizes[:, level, 1, None]
        centre = torch.stack((x[:, None, :].expand(-1, H, -1), y[:, :, None].expand(-1, -1, W)), dim=-1)
        side = torch.full_like(centre, BASE_PROPOSAL_SIZE * 2.0**level)
        boxes.append(torch.cat((centre, side), dim=-1).flatten(1, 2))  # (N, H*W, 4)
    proposals = torch.cat(boxes, dim=1)  # (N, S, 4)
    padding = torch.cat([mask.flatten(1) for mask in levels.padding_masks], dim=1)  # (N, S)
    valid = ((proposals > 0.01) & (proposals < 0.99)).all(-1) & ~padding
    # invalid ones are replaced before the logarithm, which would be NaN beyond the border
    safe = torch.where(valid[..., None], proposals, 0.5)
    box_logits = torch.log(safe / (1 - safe)).masked_fill(~valid[..., None], torch.inf)
    return box_logits, valid
