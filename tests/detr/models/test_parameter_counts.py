"""Sizes of the R50 models of the paper (recipe, section 3), 91 classes and 300 queries."""

import pytest
import torch

from detr.models import Backbone, DeformableDETR, deformable_detr

# total, trainable, unique tensors, then (tensors, elements) of main, backbone and linear projections
EXPECTED = {
    "single": (34_066_593, 33_844_193, 509, (218, 10_413_791), (42, 23_232_512), (26, 197_890)),
    "multi": (40_069_665, 39_847_265, 521, (230, 15_824_735), (42, 23_232_512), (26, 790_018)),
    "refine": (40_849_660, 40_627_260, 561, (270, 16_604_730), (42, 23_232_512), (26, 790_018)),
    "two_stage": (41_181_529, 40_959_129, 574, (285, 16_937_113), (42, 23_232_512), (24, 789_504)),
}
SETTINGS = {
    "single": {"num_levels": 1},
    "multi": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
}


def r50(variant: str, output_stride: int | None = None) -> DeformableDETR:
    backbone = Backbone(
        "resnet50.tv_in1k",
        out_indices=(4,) if variant == "single" else (2, 3, 4),
        freeze=("conv1", "bn1", "layer1"),
        output_stride=output_stride,
    )
    return deformable_detr(backbone, num_classes=91, **SETTINGS[variant])


@pytest.mark.parametrize("variant", EXPECTED)
def test_counts(variant):
    with torch.device("meta"):
        model = r50(variant)
    total, trainable, tensors, main, backbone, linear = EXPECTED[variant]
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == total
    assert sum(p.numel() for p in parameters.values() if p.requires_grad) == trainable
    assert len(model.state_dict()) == tensors
    groups = {"main": [0, 0], "backbone": [0, 0], "linear": [0, 0]}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        is_linear = "reference_points" in name or "sampling_offsets" in name
        group = groups["backbone" if name.startswith("backbone.") else "linear" if is_linear else "main"]
        group[0] += 1
        group[1] += parameter.numel()
    assert groups == {"main": list(main), "backbone": list(backbone), "linear": list(linear)}


def test_frozen_batch_norm_buffers():
    with torch.device("meta"):
        backbone = r50("multi").backbone
    assert (
        sum(buffer.numel() for name, buffer in backbone.state_dict().items() if "bn" in name)
        + sum(buffer.numel() for name, buffer in backbone.state_dict().items() if "downsample.1" in name)
        == 106_240
    )


def test_dc5_has_the_parameters_of_c5_at_half_the_stride():
    with torch.device("meta"):
        plain, dilated = r50("single"), r50("single", output_stride=16)
    assert plain.backbone.strides == (32,)
    assert dilated.backbone.strides == (16,)
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in dilated.named_parameters()}


def test_encoder_tokens_of_coco_images():
    """800x1066 gives 17,821 tokens and 800x1333 gives 22,223 (recipe, section 3)."""
    for width, tokens in ((1066, 17_821), (1333, 22_223)):
        with torch.device("meta"):
            model = r50("multi")
            features = model.backbone.net(torch.empty(1, 3, 800, width))
            levels = model.neck(features)
        assert sum(level.shape[-2] * level.shape[-1] for level in levels) == tokens
