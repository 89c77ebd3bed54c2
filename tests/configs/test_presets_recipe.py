"""Every number of the recipe (sections 4, 5, 6.1 to 6.2 and 7) in the four presets of the paper."""

from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from detr.data.steps import OneOf, RandomFlip, RandomSizeCrop, ResizeShortSide
from detr.engine.run_folder import config_differences
from tools.override_checks import CONFIG_DIR

# (levels, backbone features, refinement, two stages)
PRESETS = {
    "r50_single_scale_50ep": (1, [4], False, False),
    "r50_50ep": (4, [2, 3, 4], False, False),
    "r50_refine_50ep": (4, [2, 3, 4], True, False),
    "r50_two_stage_50ep": (4, [2, 3, 4], True, True),
}
SIZES = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]
RECIPE = {
    # section 4
    "optimizer.lr": 2e-4,
    "optimizer.backbone_lr_factor": 0.1,
    "optimizer.linear_proj_lr_factor": 0.1,
    "optimizer.weight_decay": 1e-4,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.base_batch": 32,
    "optimizer.scale_lr": True,
    "schedule.epochs": 50,
    "schedule.milestones": [40],
    "schedule.gamma": 0.1,
    "schedule.warmup_steps": 0,
    "trainer.clip": 0.1,
    "trainer.ema_decay": None,
    "trainer.accumulate": 1,
    "precision.name": "fp32",
    # 8 GPUs
    "data.batch_size": 4,
    "data.label_map": "category_id",
    "data.pad_to": 1,
    "seed": 42,
    # section 5
    "criterion.matcher.cost_class": 2,
    "criterion.matcher.cost_bbox": 5,
    "criterion.matcher.cost_giou": 2,
    "criterion.matcher.focal_alpha": 0.25,
    "criterion.matcher.focal_gamma": 2,
    "criterion.weight_ce": 2,
    "criterion.weight_bbox": 5,
    "criterion.weight_giou": 2,
    "criterion.focal_alpha": 0.25,
    "criterion.focal_gamma": 2,
    "criterion.aux_loss": True,
    "evaluator.top_k": 100,
    "transforms.eval.size": 800,
    "transforms.eval.max_size": 1333,
    # section 6.1
    "backbone.name": "resnet50.tv_in1k",
    "backbone.pretrained": True,
    "backbone.freeze": ["conv1", "bn1", "layer1"],
    "backbone.freeze_norm": True,
    "backbone.output_stride": None,
    # section 6.2
    "model.d_model": 256,
    "model.num_heads": 8,
    "model.num_encoder_points": 4,
    "model.num_decoder_points": 4,
    "model.num_encoder_layers": 6,
    "model.num_decoder_layers": 6,
    "model.dim_feedforward": 1024,
    "model.dropout": 0.1,
    "model.num_queries": 300,
    # section 9: later changes and fixes are off
    "model.look_forward_twice": False,
    "model.proposal_score": "binary",
    "model.exclude_padding_proposals": False,
    # section 7
    "transforms.train.sizes": SIZES,
    "transforms.train.max_size": 1333,
    "transforms.train.crop_source_sizes": [400, 500, 600],
    "transforms.train.crop_sizes": [384, 600],
    "transforms.train.flip_probability": 0.5,
}


@pytest.fixture(scope="module", params=PRESETS)
def preset(request: pytest.FixtureRequest) -> tuple[str, DictConfig]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return request.param, compose("train", overrides=[f"experiment={request.param}"])


def values_of(cfg: DictConfig, keys: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True)
    values: dict[str, Any] = {}
    for key in keys:
        value: Any = plain
        for name in key.split("."):
            value = value[name]
        values[key] = value
    return values


def test_a_preset_is_the_recipe(preset: tuple[str, DictConfig]):
    name, cfg = preset
    levels, features, refine, two_stage = PRESETS[name]
    own = {
        "name": name,
        "model.num_levels": levels,
        "model.backbone.out_indices": features,
        "model.with_box_refine": refine,
        "model.two_stage": two_stage,
    }
    assert values_of(cfg, RECIPE | own) == RECIPE | own


def test_what_a_preset_builds_carries_the_values(preset: tuple[str, DictConfig]):
    _, cfg = preset
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("neck", "backbone", "sampling_offsets")})
    optimizer = instantiate(cfg.optimizer)(model, total_batch=32)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-4, 2e-5, 2e-5])
    for group in optimizer.param_groups:
        assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (1e-4, (0.9, 0.999), 1e-8)

    criterion = instantiate(cfg.criterion, num_classes=91)
    assert criterion.weights == {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}
    assert (criterion.focal_alpha, criterion.focal_gamma, criterion.aux_loss) == (0.25, 2, True)
    matcher = criterion.matcher
    assert (matcher.cost_class, matcher.cost_bbox, matcher.cost_giou) == (2, 5, 2)
    assert (matcher.focal_alpha, matcher.focal_gamma) == (0.25, 2)

    flip, choice = instantiate(cfg.transforms.train, _convert_="all").steps
    assert isinstance(flip, RandomFlip)
    assert flip.probability == 0.5
    assert isinstance(choice, OneOf)
    resize, cropped = choice.steps
    source, crop, final = cropped.steps
    assert isinstance(resize, ResizeShortSide)
    assert isinstance(crop, RandomSizeCrop)
    assert (list(resize.sizes), resize.max_size) == (list(final.sizes), final.max_size) == (SIZES, 1333)
    assert (list(source.sizes), source.max_size) == ([400, 500, 600], None)
    assert (crop.min_size, crop.max_size) == (384, 600)


def test_the_fast_preset_differs_in_what_its_header_names():
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        parity, fast = (
            OmegaConf.to_container(compose("train", overrides=[f"experiment={name}"]), resolve=True)
            for name in ("r50_refine_50ep", "fast_r50_refine_50ep")
        )
    assert isinstance(parity, dict)
    assert isinstance(fast, dict)
    differences = config_differences(parity, fast)
    # the model and the data repeat what the groups say
    keys = {line.partition(":")[0] for line in differences if not line.startswith("model.")}
    sampling = {f"data.sampling.{switch}" for switch in ("group_by_aspect", "one_scale_a_batch")}
    assert keys == {"precision.name", "trainer.compile", "kernel.backend", "data.pad_to", *sampling}
    header = (CONFIG_DIR / "experiment" / "fast_r50_refine_50ep.yaml").read_text().partition("defaults:")[0]
    choices = {"precision=bf16", "trainer.compile=true", "kernel=cuda", "data.pad_to=128"}
    for choice in choices | {f"{switch}=true" for switch in sampling}:
        assert choice in header
