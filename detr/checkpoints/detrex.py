"""Names of detrex's DeformableDETR, whose backbone is detectron2's ResNet."""

import re

from detr.checkpoints.mmdet import neck_module
from detr.checkpoints.places import Layout, Place, head_names, translate

# (ours, theirs), tried in this order; {} stands for a number
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("queries.query_embed.", "query_embedding."),
    ("level_embed", "transformer.level_embeds"),
    ("queries.", "transformer."),
    ("encoder.layers.{}.self_attn_norm.", "transformer.encoder.layers.{}.norms.0."),
    ("encoder.layers.{}.ffn.norm.", "transformer.encoder.layers.{}.norms.1."),
    ("encoder.layers.{}.ffn.linear1.", "transformer.encoder.layers.{}.ffns.0.layers.0.0."),
    ("encoder.layers.{}.ffn.linear2.", "transformer.encoder.layers.{}.ffns.0.layers.1."),
    ("encoder.layers.{}.self_attn.", "transformer.encoder.layers.{}.attentions.0."),
    ("decoder.layers.{}.self_attn_norm.", "transformer.decoder.layers.{}.norms.0."),
    ("decoder.layers.{}.cross_attn_norm.", "transformer.decoder.layers.{}.norms.1."),
    ("decoder.layers.{}.ffn.norm.", "transformer.decoder.layers.{}.norms.2."),
    ("decoder.layers.{}.ffn.linear1.", "transformer.decoder.layers.{}.ffns.0.layers.0.0."),
    ("decoder.layers.{}.ffn.linear2.", "transformer.decoder.layers.{}.ffns.0.layers.1."),
    ("decoder.layers.{}.self_attn.", "transformer.decoder.layers.{}.attentions.0.attn."),
    ("decoder.layers.{}.cross_attn.", "transformer.decoder.layers.{}.attentions.1."),
)


def detrex_places(name: str, layout: Layout) -> list[Place]:
    """Where detrex keeps a tensor of ours.

    Raises:
        KeyError: Our model has no such tensor.
        ValueError: The backbone is no ResNet.
    """
    if name.startswith("backbone.net."):
        return [Place((_resnet_name(name),), optional=name.endswith("num_batches_tracked"))]
    level = re.match(r"neck\.input_proj\.(\d+)\.([01])\.(weight|bias)$", name)
    if level:
        part = "conv" if level.group(2) == "0" else "norm"
        return [Place((f"{neck_module(int(level.group(1)), layout)}.{part}.{level.group(3)}",))]
    heads = head_names(name, layout, "")
    if heads is not None:
        aliased = layout.with_box_refine and (heads[0].startswith("bbox_embed.") or layout.two_stage)
        return [Place((*heads, *(f"transformer.decoder.{head}" for head in heads if aliased)))]
    theirs = translate(name, _PATTERNS)
    if theirs is None:
        raise KeyError(f"{name!r} is not a tensor of this model")
    # an early version misspelt this module
    misspelt = theirs.replace("enc_output_norm", "enc_outpout_norm")
    return [Place((theirs,), fallback=misspelt if misspelt != theirs else None)]


def _resnet_name(name: str) -> str:
    """detectron2's name of a tensor of a timm ResNet: stages from res2, norms inside their convolutions."""
    stem = re.match(r"backbone\.net\.(conv1|bn1)\.(.*)", name)
    if stem:
        return "backbone.stem.conv1." + ("norm." if stem.group(1) == "bn1" else "") + stem.group(2)
    block = re.match(r"backbone\.net\.layer(\d)\.(\d+)\.(conv\d|bn\d|downsample\.[01])\.(.*)", name)
    if block is None:
        raise ValueError(
            f"{name}: detrex's names are known for ResNet backbones only; convert with another codebase's names, or "
            "use backbone=resnet50"
        )
    stage, index, part, rest = block.groups()
    if part.startswith("downsample"):
        module = "shortcut" + (".norm" if part.endswith("1") else "")
    else:
        module = f"conv{part[-1]}" + (".norm" if part.startswith("bn") else "")
    return f"backbone.res{int(stage) + 1}.{index}.{module}.{rest}"
