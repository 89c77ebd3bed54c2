"""Names of MMDetection 3's DeformableDETR. Its neck has no biases unless its config asks for them."""

import re

from detr.checkpoints.places import Layout, Place, head_names, translate

# (ours, theirs), tried in this order; {} stands for a number
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("backbone.net.", "backbone."),
    ("queries.query_embed.", "query_embedding."),
    ("level_embed", "level_embed"),
    ("queries.reference_points.", "reference_points_fc."),
    ("queries.enc_output_norm.", "memory_trans_norm."),
    ("queries.enc_output.", "memory_trans_fc."),
    ("queries.pos_trans_norm.", "pos_trans_norm."),
    ("queries.pos_trans.", "pos_trans_fc."),
    ("encoder.layers.{}.self_attn_norm.", "encoder.layers.{}.norms.0."),
    ("encoder.layers.{}.ffn.norm.", "encoder.layers.{}.norms.1."),
    ("encoder.layers.{}.ffn.linear1.", "encoder.layers.{}.ffn.layers.0.0."),
    ("encoder.layers.{}.ffn.linear2.", "encoder.layers.{}.ffn.layers.1."),
    ("encoder.layers.{}.self_attn.", "encoder.layers.{}.self_attn."),
    ("decoder.layers.{}.self_attn_norm.", "decoder.layers.{}.norms.0."),
    ("decoder.layers.{}.cross_attn_norm.", "decoder.layers.{}.norms.1."),
    ("decoder.layers.{}.ffn.norm.", "decoder.layers.{}.norms.2."),
    ("decoder.layers.{}.ffn.linear1.", "decoder.layers.{}.ffn.layers.0.0."),
    ("decoder.layers.{}.ffn.linear2.", "decoder.layers.{}.ffn.layers.1."),
    ("decoder.layers.{}.self_attn.", "decoder.layers.{}.self_attn.attn."),
    ("decoder.layers.{}.cross_attn.", "decoder.layers.{}.cross_attn."),
)


def mmdet_places(name: str, layout: Layout) -> list[Place]:
    """Where MMDetection keeps a tensor of ours.

    Raises:
        KeyError: Our model has no such tensor.
    """
    level = re.match(r"neck\.input_proj\.(\d+)\.([01])\.(weight|bias)$", name)
    if level:
        part = "conv" if level.group(2) == "0" else "gn"
        theirs = f"{neck_module(int(level.group(1)), layout)}.{part}.{level.group(3)}"
        return [Place((theirs,), optional=theirs.endswith("conv.bias"))]
    heads = head_names(name, layout, "bbox_head.")
    if heads is not None:
        return [Place(tuple(_branch(head) for head in heads))]
    theirs_or_none = translate(name, _PATTERNS)
    if theirs_or_none is None:
        raise KeyError(f"{name!r} is not a tensor of this model")
    return [Place((theirs_or_none,), optional=name.endswith("num_batches_tracked"))]


def neck_module(level: int, layout: Layout) -> str:
    """The convolution of a level: first those of backbone features, then the strided ones, counted anew."""
    extra = level - layout.num_features
    return f"neck.convs.{level}" if extra < 0 else f"neck.extra_convs.{extra}"


def _branch(head: str) -> str:
    head = head.replace("class_embed.", "cls_branches.").replace("bbox_embed.", "reg_branches.")
    # their box head is a sequence with the ReLUs in it
    return re.sub(r"\.layers\.(\d)\.", lambda layer: f".{2 * int(layer.group(1))}.", head)
