"""From sizes to a detector: the one place that knows which parts fit together."""

from detr.models.backbone import Backbone
from detr.models.decoder import Decoder, DecoderLayer
from detr.models.deformable_detr import DeformableDETR
from detr.models.encoder import Encoder, EncoderLayer
from detr.models.heads import DetectionHeads
from detr.models.neck import Neck
from detr.models.queries import LearnedQueries
from detr.models.two_stage import ProposalQueries, ProposalScore
from ops import KernelConfig, MSDeformAttn


def deformable_detr(
    backbone: Backbone,
    *,
    num_classes: int,
    num_queries: int = 300,
    num_levels: int = 4,
    d_model: int = 256,
    num_heads: int = 8,
    num_encoder_layers: int = 6,
    num_decoder_layers: int = 6,
    dim_feedforward: int = 1024,
    dropout: float = 0.1,
    num_encoder_points: int = 4,
    num_decoder_points: int = 4,
    with_box_refine: bool = False,
    two_stage: bool = False,
    look_forward_twice: bool = False,
    proposal_score: ProposalScore = "binary",
    exclude_padding_proposals: bool = False,
    kernel: KernelConfig | None = None,
) -> DeformableDETR:
    """A Deformable DETR around `backbone`; the defaults are the paper's multi-scale model.

    Args:
        backbone: Its features become the first levels.
        num_classes: Classes of the data set.
        num_queries: Detections before the top-k.
        num_levels: Feature levels; those beyond the backbone's features are strided convolutions.
        d_model: Channels, a multiple of `num_heads`, of 32 (group norm) and of 4 (position encoding).
        num_heads: Attention heads.
        num_encoder_layers: Encoder layers, 0 or more.
        num_decoder_layers: Decoder layers, 1 or more.
        dim_feedforward: Hidden channels of the feed-forward parts.
        dropout: In [0, 1).
        num_encoder_points: Sampling points a head and level in the encoder.
        num_decoder_points: The same in the decoder.
        with_box_refine: Iterative box refinement.
        two_stage: Queries from encoder proposals; needs `with_box_refine`.
        look_forward_twice: See `Decoder`; off in the original.
        proposal_score: See `ProposalQueries`.
        exclude_padding_proposals: See `ProposalQueries`; off in the original.
        kernel: MSDA kernel of every attention; None means `KernelConfig()`.

    Raises:
        ValueError: Settings that do not fit together.
    """
    if two_stage and not with_box_refine:
        raise ValueError(
            "two_stage=true needs with_box_refine=true: proposals are boxes that the decoder refines. "
            "Set model.with_box_refine=true or use model=two_stage"
        )
    if d_model % 32 or d_model % num_heads:
        raise ValueError(f"d_model={d_model} must be a multiple of 32 and of num_heads={num_heads}")
    if num_decoder_layers < 1 or num_encoder_layers < 0:
        raise ValueError(
            f"num_decoder_layers must be at least 1 and num_encoder_layers at least 0; got {num_decoder_layers} "
            f"and {num_encoder_layers}"
        )
    encoder_layer = EncoderLayer(
        MSDeformAttn(d_model, num_levels, num_heads, num_encoder_points, kernel=kernel),
        d_model=d_model,
        dim_feedforward=dim_feedforward,
        dropout=dropout,
    )
    decoder_layer = DecoderLayer(
        MSDeformAttn(d_model, num_levels, num_heads, num_decoder_points, kernel=kernel),
        d_model=d_model,
        num_heads=num_heads,
        dim_feedforward=dim_feedforward,
        dropout=dropout,
    )
    queries: LearnedQueries | ProposalQueries
    if two_stage:
        queries = ProposalQueries(
            num_queries, d_model, proposal_score=proposal_score, exclude_padding=exclude_padding_proposals
        )
    else:
        queries = LearnedQueries(num_queries, d_model)
    return DeformableDETR(
        backbone,
        Neck(backbone.channels, d_model, num_levels),
        Encoder(encoder_layer, num_encoder_layers),
        queries,
        Decoder(
            decoder_layer,
            num_decoder_layers,
            with_box_refine=with_box_refine,
            look_forward_twice=look_forward_twice,
        ),
        DetectionHeads(d_model, num_classes, num_decoder_layers, with_box_refine=with_box_refine, two_stage=two_stage),
        d_model=d_model,
    )
