"""Distances of gradients from float64, on the CPU."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from detr.benchmark.accuracy.gradient_report import GradientRow, gradient_table, gradient_values, plot_gradients
from detr.benchmark.accuracy.gradients import (
    Distance,
    FirstMatches,
    ModelGradients,
    gradient_distances,
    model_gradients,
)
from detr.engine.precision import Precision
from detr.engine.run_folder import write_json
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, DeformableDETR, deformable_detr
from detr.structures import Batch, ImageBatch, Target
from ops import KernelConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> DeformableDETR:
    torch.manual_seed(0)
    detector = deformable_detr(
        Backbone("test_resnet", freeze_norm=True),
        num_classes=3,
        num_queries=12,
        num_levels=2,
        d_model=32,
        num_heads=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=32,
        with_box_refine=True,
        kernel=KernelConfig("reference"),
    )
    for parameter in detector.parameters():
        # away from the zeros it starts from, where most gradients vanish
        parameter.data += 0.02 * torch.randn_like(parameter)
    return detector.eval()


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = [torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8, generator=generator) for _ in range(2)]
    targets = tuple(
        Target(
            labels=torch.randint(0, 3, (4,), generator=generator),
            boxes=torch.rand(4, 4, generator=generator) * 0.4 + 0.2,
            image_id=index,
            orig_size=(64, 96),
        )
        for index in range(2)
    )
    return Batch(ImageBatch.from_images(images), targets)


def gradients(model: DeformableDETR, criterion: SetCriterion, batch: Batch, precision: Precision) -> ModelGradients:
    return model_gradients(model, criterion, batch, precision=precision, device=CPU)


@pytest.fixture
def criterion() -> SetCriterion:
    criterion = SetCriterion(num_classes=3, matcher=HungarianMatcher())
    criterion.matcher = FirstMatches(criterion.matcher)
    return criterion


def test_low_precision_is_far_and_float32_near(model: DeformableDETR, criterion: SetCriterion, batch: Batch):
    exact = gradients(copy.deepcopy(model).double(), criterion, batch, Precision("fp32"))
    assert gradients(copy.deepcopy(model).double(), criterion, batch, Precision("fp32")).loss == exact.loss
    errors = {}
    for name in ("fp32", "bf16"):
        found = gradients(model, criterion, batch, Precision(name))
        errors[name] = {distance.quantity: distance.error for distance in gradient_distances(found, exact)}
    assert set(errors["fp32"]) == {
        "all parameters",
        "backbone",
        "decoder",
        "encoder",
        "heads",
        "level_embed",
        "neck",
        "queries",
        "sampling offsets and reference points",
        *(f"{stack} value, level {level}" for stack in ("encoder", "decoder") for level in (0, 1)),
    }
    for quantity, error in errors["fp32"].items():
        assert 0 < error < 2e-4, quantity
        assert 10 * error < errors["bf16"][quantity] < 0.5, quantity


def test_the_gradient_of_a_value_is_that_of_its_projection(
    model: DeformableDETR, criterion: SetCriterion, batch: Batch
):
    found = gradients(copy.deepcopy(model).double(), criterion, batch, Precision("fp32"))
    assert set(found.values) == {f"{stack}.layers.{index}" for stack in ("encoder", "decoder") for index in (0, 1)}
    for layer, levels in found.values.items():
        assert len(levels) == 2
        attention = "self_attn" if layer.startswith("encoder") else "cross_attn"
        bias = found.parameters[f"{layer}.{attention}.value_proj.bias"]
        torch.testing.assert_close(torch.cat(levels, dim=1).sum((0, 1)), bias)


def test_rounding_does_not_change_what_is_matched(model: DeformableDETR, batch: Batch):
    criterion = SetCriterion(num_classes=3, matcher=HungarianMatcher())
    criterion.matcher = FirstMatches(criterion.matcher)
    first = gradients(model, criterion, batch, Precision("fp32"))
    other = copy.deepcopy(model)
    # other queries would be matched by themselves
    torch.nn.init.normal_(next(other.queries.parameters()), generator=torch.Generator().manual_seed(3))
    kept = gradients(other, criterion, batch, Precision("fp32")).loss
    criterion.matcher = FirstMatches(HungarianMatcher())
    free = gradients(other, criterion, batch, Precision("fp32")).loss
    assert kept > free
    assert first.loss != kept


def test_a_distance_is_relative_and_a_broken_gradient_is_not_near():
    exact = ModelGradients(1.0, {"neck.a": torch.tensor([3.0, 4.0]).double()}, {})
    close = ModelGradients(1.0, {"neck.a": torch.tensor([3.0, 4.5]).double()}, {})
    broken = ModelGradients(1.0, {"neck.a": torch.tensor([3.0, float("nan")]).double()}, {})
    [whole, part] = gradient_distances(close, exact)
    assert (whole.quantity, part.quantity) == ("all parameters", "neck")
    assert whole.error == pytest.approx(0.1)
    assert whole.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert math.isnan(gradient_distances(broken, exact)[0].error)


def test_the_table_has_a_column_a_checkpoint(tmp_path: Path):
    rows = [
        GradientRow(step, name, 1.0, 1.0, (Distance("all parameters", error, 0.9),))
        for step in (100, 5)
        for name, error in (("fp32", 1e-6), ("bf16", 2e-2))
    ]
    rows.append(GradientRow(5, "cuda", None, 1.0, (), "no GPU | here"))
    table = gradient_table(rows)
    assert "| gradient of | configuration | step 5 | step 100 | least cosine |" in table
    assert "| all parameters | bf16 | 2.0e-02 | 2.0e-02 | 0.900000 |" in table
    assert "| cuda | 5 | no GPU / here |" in table
    plot_gradients(rows, tmp_path / "gradients.png", title="Title")
    assert (tmp_path / "gradients.png").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
def test_a_gradient_that_is_not_finite_is_reported(tmp_path: Path):
    nan, inf = math.nan, math.inf
    rows = [
        GradientRow(5, "fp16", nan, 1.0, (Distance("queries", nan, nan), Distance("heads", inf, 0.5))),
        GradientRow(5, "fp16 from bf16", nan, 1.0, (Distance("queries", 0.0, 1.0), Distance("heads", nan, nan))),
        GradientRow(5, "fp32", 1.0, 1.0, (Distance("queries", 0.0, 1.0), Distance("heads", 1e-6, 1.0))),
    ]
    write_json(tmp_path / "gradients.json", gradient_values(rows))
    broken, _, whole = json.loads((tmp_path / "gradients.json").read_text())
    assert broken["loss"] is None
    assert broken["distances"][0] == {"quantity": "queries", "error": None, "cosine": None}
    assert broken["distances"][1] == {"quantity": "heads", "error": None, "cosine": 0.5}
    assert whole["distances"][1] == {"quantity": "heads", "error": 1e-6, "cosine": 1.0}
    assert "| queries | fp16 | nan | nan |" in gradient_table(rows)
    # of one quantity nothing can be drawn
    plot_gradients(rows, tmp_path / "gradients.png", title="Title")
    assert (tmp_path / "gradients.png").stat().st_size > 1000
