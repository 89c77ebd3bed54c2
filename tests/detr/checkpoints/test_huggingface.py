"""Hugging Face's model from its own files: equal outputs. Skipped where transformers is not installed."""

import json
from pathlib import Path

import pytest
import torch

from detr.checkpoints.convert import export_state, import_state
from detr.checkpoints.files import read_tensors, write_tensors
from detr.checkpoints.huggingface import huggingface_config, huggingface_file_name

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VARIANTS = {
    "plain": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
}
# ours, of the model below
SIZES = {
    "num_queries": 12,
    "num_levels": 4,
    "d_model": 32,
    "num_heads": 4,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "dim_feedforward": 48,
    "dropout": 0.0,
    "num_encoder_points": 4,
    "num_decoder_points": 4,
    "with_box_refine": False,
    "two_stage": False,
}


def huggingface_model(variant: str):
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=True,
        backbone="resnet18",
        num_labels=5,
        num_queries=12,
        two_stage_num_proposals=12,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        disable_custom_kernels=True,
        **VARIANTS[variant],
    )
    torch.manual_seed(0)
    model = transformers.DeformableDetrForObjectDetection(config).eval()
    # fresh box heads are zero and the same in every layer, which would hide a wrong order
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "backbone" not in name and "norm" not in name:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_equal(variant: str, small_detector, batch, tmp_path: Path):
    theirs = huggingface_model(variant)
    refine = variant != "plain"
    ours = small_detector(**VARIANTS[variant]).eval()
    images = batch().images
    pixels = (images.pixels / 255 - ours.backbone.pixel_mean) / ours.backbone.pixel_std
    pixels = pixels.masked_fill(images.padding_mask[:, None], 0)

    theirs.save_pretrained(tmp_path)
    # what it holds in memory and what it writes have different names
    for tensors in (theirs.state_dict(), read_tensors(tmp_path)):
        imported = import_state(tensors, "hf", ours.state_dict(), with_box_refine=refine, source="FILE")
        ours.load_state_dict(imported.state, strict=True)
        with torch.no_grad():
            expected = theirs(pixel_values=pixels, pixel_mask=(~images.padding_mask).long())
            found = ours(images)
        assert (found.pred_logits - expected.logits).abs().max() <= 1e-4
        assert (found.pred_boxes - expected.pred_boxes).abs().max() <= 1e-4
        assert expected.logits.std() > 0.1

    # and back, with class heads that differ in every layer
    with torch.no_grad():
        for layer, head in enumerate(ours.heads.class_embed):
            head.bias.add_(layer)
        found = ours(images)
    back = export_state(ours.state_dict(), "hf", with_box_refine=refine)
    write_tensors(back, tmp_path / "model.safetensors")
    backbone = {"name": "resnet18", "out_indices": [2, 3, 4]}
    config = huggingface_config({**SIZES, **VARIANTS[variant], "backbone": backbone}, ["a", "b", "", "d", "e"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.id2label[2] == "class 2"
    # as it ties nothing, it holds every layer's class head, whatever it had tied before
    held = {huggingface_file_name(key): value for key, value in loaded.state_dict().items()}
    for name, tensor in back.items():
        assert torch.equal(held[name], tensor), name
    with torch.no_grad():
        expected = loaded.eval()(pixel_values=pixels, pixel_mask=(~images.padding_mask).long())
    assert (found.pred_logits - expected.logits).abs().max() <= 1e-4
