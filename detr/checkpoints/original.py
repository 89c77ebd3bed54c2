"""Names of the original Deformable DETR (fundamentalvision, commit 11169a6) and ours, both ways.

The original lists shared tensors several times: one-stage heads once a layer, and with refinement every box
head again under `transformer.decoder`. Ours holds each tensor once.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from detr.checkpoints.places import Layout, Place, head_names, translate

# (original, ours), tried in this order; {} stands for a number
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("backbone.0.body.", "backbone.net."),
    ("input_proj.", "neck.input_proj."),
    ("query_embed.", "queries.query_embed."),
    ("transformer.level_embed", "level_embed"),
    ("transformer.reference_points.", "queries.reference_points."),
    ("transformer.enc_output_norm.", "queries.enc_output_norm."),
    ("transformer.enc_output.", "queries.enc_output."),
    ("transformer.pos_trans_norm.", "queries.pos_trans_norm."),
    ("transformer.pos_trans.", "queries.pos_trans."),
    ("transformer.encoder.layers.{}.norm1.", "encoder.layers.{}.self_attn_norm."),
    ("transformer.encoder.layers.{}.norm2.", "encoder.layers.{}.ffn.norm."),
    ("transformer.encoder.layers.{}.linear1.", "encoder.layers.{}.ffn.linear1."),
    ("transformer.encoder.layers.{}.linear2.", "encoder.layers.{}.ffn.linear2."),
    ("transformer.encoder.layers.{}.self_attn.", "encoder.layers.{}.self_attn."),
    # the original numbers its norms by when they were written, not by when they run
    ("transformer.decoder.layers.{}.norm1.", "decoder.layers.{}.cross_attn_norm."),
    ("transformer.decoder.layers.{}.norm2.", "decoder.layers.{}.self_attn_norm."),
    ("transformer.decoder.layers.{}.norm3.", "decoder.layers.{}.ffn.norm."),
    ("transformer.decoder.layers.{}.linear1.", "decoder.layers.{}.ffn.linear1."),
    ("transformer.decoder.layers.{}.linear2.", "decoder.layers.{}.ffn.linear2."),
    ("transformer.decoder.layers.{}.self_attn.", "decoder.layers.{}.self_attn."),
    ("transformer.decoder.layers.{}.cross_attn.", "decoder.layers.{}.cross_attn."),
    ("class_embed.", "heads.class_embed."),
    ("bbox_embed.", "heads.bbox_embed."),
)

_ALIASES = ("transformer.decoder.bbox_embed.", "transformer.decoder.class_embed.")


def name_from_original(name: str) -> str:
    """Our name of a tensor of the original.

    Raises:
        KeyError: The original has no such tensor.
    """
    return _translate(name, _PATTERNS, "the original Deformable DETR")


def name_to_original(name: str) -> str:
    """The original's name of a tensor of ours; of shared tensors, the first of its names.

    Raises:
        KeyError: Our model has no such tensor.
    """
    return _translate(name, tuple((ours, original) for original, ours in _PATTERNS), "this model")


def from_original(state: Mapping[str, Tensor], *, shared_heads: bool) -> dict[str, Tensor]:
    """Our state_dict from the original's.

    Args:
        state: By the original's names, with or without its aliases.
        shared_heads: The model has no refinement, so that all layers share the heads of layer 0.

    Raises:
        KeyError: A name is not the original's.
    """
    ours = {}
    for name, tensor in state.items():
        if name.startswith(_ALIASES):
            continue
        if shared_heads and re.match(r"(class|bbox)_embed\.[1-9]", name):
            continue
        ours[name_from_original(name)] = tensor
    return ours


def original_places(name: str, layout: Layout) -> list[Place]:
    """Where the original keeps a tensor of ours, with all names it lists it by."""
    heads = head_names(name, layout, "")
    if heads is None:
        return [Place((name_to_original(name),), optional=name.endswith("num_batches_tracked"))]
    aliased = layout.with_box_refine and (heads[0].startswith("bbox_embed.") or layout.two_stage)
    aliases = [f"transformer.decoder.{head}" for head in heads] if aliased else []
    return [Place((*heads, *aliases))]


def _translate(name: str, patterns: tuple[tuple[str, str], ...], owner: str) -> str:
    translated = translate(name, patterns)
    if translated is None:
        raise KeyError(f"{name!r} is not a tensor of {owner}; is the checkpoint of another codebase?")
    return translated
