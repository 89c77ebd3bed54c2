"""Names of Hugging Face's DeformableDetrForObjectDetection, as its files hold them in versions 4 and 5.

The self-attention of the decoder is three projections there. Version 5 renames some modules in memory and writes
the old names; a state dict of the model has the new ones, which `huggingface_file_name` turns into those of files.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from detr.checkpoints.places import Layout, Place, head_names, translate

# (ours, theirs), tried in this order; {} stands for a number
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("backbone.net.", "model.backbone.conv_encoder.model."),
    ("neck.input_proj.", "model.input_proj."),
    ("queries.query_embed.", "model.query_position_embeddings."),
    ("level_embed", "model.level_embed"),
    ("queries.", "model."),
    ("encoder.layers.{}.self_attn_norm.", "model.encoder.layers.{}.self_attn_layer_norm."),
    ("encoder.layers.{}.ffn.norm.", "model.encoder.layers.{}.final_layer_norm."),
    ("encoder.layers.{}.ffn.linear1.", "model.encoder.layers.{}.fc1."),
    ("encoder.layers.{}.ffn.linear2.", "model.encoder.layers.{}.fc2."),
    ("encoder.layers.{}.self_attn.", "model.encoder.layers.{}.self_attn."),
    ("decoder.layers.{}.cross_attn_norm.", "model.decoder.layers.{}.encoder_attn_layer_norm."),
    ("decoder.layers.{}.self_attn_norm.", "model.decoder.layers.{}.self_attn_layer_norm."),
    ("decoder.layers.{}.ffn.norm.", "model.decoder.layers.{}.final_layer_norm."),
    ("decoder.layers.{}.ffn.linear1.", "model.decoder.layers.{}.fc1."),
    ("decoder.layers.{}.ffn.linear2.", "model.decoder.layers.{}.fc2."),
    ("decoder.layers.{}.self_attn.out_proj.", "model.decoder.layers.{}.self_attn.out_proj."),
    ("decoder.layers.{}.cross_attn.", "model.decoder.layers.{}.encoder_attn."),
)

_NEW_TO_FILE = (
    (re.compile(r"^model\.backbone\.model\."), "model.backbone.conv_encoder.model."),
    (re.compile(r"\.mlp\.(fc[12])\."), r".\1."),
    (re.compile(r"\.self_attn\.o_proj\."), ".self_attn.out_proj."),
)


def huggingface_file_name(name: str) -> str:
    """The name that files hold of a tensor of the model in memory (version 5); names of files stay."""
    for pattern, replacement in _NEW_TO_FILE:
        name = pattern.sub(replacement, name)
    return name


def huggingface_places(name: str, layout: Layout) -> list[Place]:
    """Where Hugging Face keeps a tensor of ours.

    Raises:
        KeyError: Our model has no such tensor.
    """
    packed = re.match(r"decoder\.layers\.(\d+)\.self_attn\.in_proj_(weight|bias)$", name)
    if packed:
        prefix = f"model.decoder.layers.{packed.group(1)}.self_attn."
        return [
            Place((f"{prefix}{part}_proj.{packed.group(2)}",), chunk=(index, 3)) for index, part in enumerate("qkv")
        ]
    heads = head_names(name, layout, "")
    if heads is None:
        theirs = translate(name, _PATTERNS)
        if theirs is None:
            raise KeyError(f"{name!r} is not a tensor of this model")
        return [Place((theirs,), optional=name.endswith("num_batches_tracked"))]
    if not layout.with_box_refine:
        return [Place(tuple(heads))]
    head = heads[0]
    if head.startswith("bbox_embed.") or layout.two_stage:
        return [Place((f"model.decoder.{head}", head))]
    # version 5 ties the class heads of a refining model and writes the first only
    return [Place((head,), fallback=re.sub(r"^class_embed\.\d+", "class_embed.0", head))]


def huggingface_config(model: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Any]:
    """The config.json of a model, for `DeformableDetrForObjectDetection.from_pretrained`.

    Args:
        model: The arguments of `detr.models.deformable_detr` as a checkpoint holds them, backbone included.
        class_names: By label.
    """
    backbone = model["backbone"]
    return {
        "model_type": "deformable_detr",
        "architectures": ["DeformableDetrForObjectDetection"],
        "backbone_config": {
            "model_type": "timm_backbone",
            "backbone": backbone["name"],
            "num_channels": 3,
            "features_only": True,
            "use_pretrained_backbone": False,
            "out_indices": list(backbone["out_indices"])[-int(model["num_levels"]) :],
        },
        "d_model": model["d_model"],
        "encoder_layers": model["num_encoder_layers"],
        "decoder_layers": model["num_decoder_layers"],
        "encoder_attention_heads": model["num_heads"],
        "decoder_attention_heads": model["num_heads"],
        "encoder_ffn_dim": model["dim_feedforward"],
        "decoder_ffn_dim": model["dim_feedforward"],
        "encoder_n_points": model["num_encoder_points"],
        "decoder_n_points": model["num_decoder_points"],
        "num_feature_levels": model["num_levels"],
        "num_queries": model["num_queries"],
        "two_stage_num_proposals": model["num_queries"],
        "two_stage": bool(model["two_stage"]),
        "with_box_refine": bool(model["with_box_refine"]),
        "dropout": model["dropout"],
        # version 5 would otherwise tie the class heads of all layers; the file has every head under all its names
        "tie_word_embeddings": not model["with_box_refine"],
        "id2label": {str(label): name or f"class {label}" for label, name in enumerate(class_names)},
        "label2id": {name or f"class {label}": label for label, name in enumerate(class_names)},
    }
