"""Behaviour of the whole detector."""

import math

import pytest
import torch

from detr.losses import HungarianMatcher, SetCriterion
from detr.structures import ImageBatch

VARIANTS = {
    "single_scale": {"num_levels": 1, "out_indices": (4,)},
    "dc5": {"num_levels": 1, "out_indices": (4,), "output_stride": 16},
    "multi_scale": {},
    "refine": {"with_box_refine": True},
    "look_forward_twice": {"with_box_refine": True, "look_forward_twice": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
    "two_stage_max_class": {
        "with_box_refine": True,
        "two_stage": True,
        "proposal_score": "max_class",
        "exclude_padding_proposals": True,
    },
}


def loss_of(model, batch):
    criterion = SetCriterion(num_classes=5, matcher=HungarianMatcher())
    return criterion(model(batch.images), batch.targets, 3.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("boxes", [(3, 0), (0, 0)], ids=["boxes", "no-boxes"])
def test_every_trainable_parameter_gets_a_gradient(variant, boxes, small_detector, batch):
    """With boxes and without: the graph must not depend on what a batch holds, or DDP hangs."""
    model = small_detector(**VARIANTS[variant])
    loss_of(model, batch(boxes=boxes)).total.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert bad == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_come_in_the_layout_of_their_parameters(variant, small_detector, batch):
    """Others are copied at every step, and DDP warns of strides that its buckets do not have."""
    model = small_detector(**VARIANTS[variant])
    strides = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() == 4:
            parameter.register_hook(lambda grad, name=name: strides.update({name: grad.stride()}))
    loss_of(model, batch(boxes=(3, 0))).total.backward()
    assert len(strides) > 10
    own = {name: parameter.stride() for name, parameter in model.named_parameters()}
    assert [name for name in strides if strides[name] != own[name]] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_halve_the_loss(variant, small_detector, batch):
    torch.manual_seed(0)
    model = small_detector(**VARIANTS[variant])
    data = batch(boxes=(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(20):
        loss = loss_of(model, data).total
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("variant", VARIANTS)
def test_meta_device(variant, small_detector, batch):
    with torch.device("meta"):
        model = small_detector(**VARIANTS[variant])
    output = model(batch().images.to("meta"))
    assert output.layer_logits.shape == (2, 2, 12, 5)
    assert output.layer_boxes.shape == (2, 2, 12, 4)


def test_initial_scores_are_the_prior(small_detector, batch):
    scores = small_detector()(batch().images).pred_logits.sigmoid()
    assert scores.mean().item() == pytest.approx(0.01, abs=0.01)
    bias = small_detector().heads.class_embed[0].bias
    torch.testing.assert_close(bias, torch.full_like(bias, -math.log(99)))


def test_padding_does_not_move_predictions_beyond_the_group_norm(small_detector):
    """With the neck's group norm neutral, a padded image must give the boxes of the same image unpadded.

    The group norm's statistics see padding (recipe, quirk Q21), and so do convolutions at the border; both
    are taken out by constant features.
    """
    torch.manual_seed(0)
    model = small_detector(with_box_refine=True, num_levels=3).eval()
    channels = model.backbone.channels
    for projection in model.neck.input_proj:
        projection[1] = torch.nn.Identity()
    features = [torch.randn(1, c, 64 // s, 96 // s) for c, s in zip(channels, (8, 16, 32), strict=True)]
    padded = [torch.nn.functional.pad(f, (0, 64 // s, 0, 32 // s)) for f, s in zip(features, (8, 16, 32), strict=True)]
    mask = torch.zeros(1, 64, 96, dtype=torch.bool)
    padded_mask = torch.ones(1, 96, 160, dtype=torch.bool)
    padded_mask[:, :64, :96] = False
    with torch.no_grad():
        plain = model.forward_features(features, mask)
        shifted = model.forward_features(padded, padded_mask)
    torch.testing.assert_close(shifted.layer_boxes, plain.layer_boxes, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(shifted.layer_logits, plain.layer_logits, atol=2e-5, rtol=1e-4)


def test_look_forward_twice_changes_gradients_and_not_outputs(small_detector, batch):
    gradients, outputs = [], []
    for twice in (False, True):
        torch.manual_seed(0)
        model = small_detector(with_box_refine=True, look_forward_twice=twice)
        for head in model.heads.bbox_embed:
            torch.nn.init.normal_(head.layers[-1].weight, std=0.1)
        output = model(batch().images)
        output.pred_boxes.sum().backward()
        outputs.append(output.layer_boxes.detach())
        gradients.append(model.heads.bbox_embed[0].layers[-1].weight.grad)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert gradients[0].abs().sum() == 0  # detached: the last box says nothing to the first head
    assert gradients[1].abs().sum() > 0


def test_excluded_padding_is_never_chosen(small_detector):
    """One small image in a large batch: with the switch, all queries lie on it (quirk Q3)."""
    images = ImageBatch.from_images(
        [torch.randint(0, 256, (3, h, w), dtype=torch.uint8) for h, w in ((160, 192), (96, 64))]
    )
    chosen = {}
    for exclude in (False, True):
        torch.manual_seed(0)
        model = small_detector(with_box_refine=True, two_stage=True, exclude_padding_proposals=exclude, num_queries=60)
        # make padding attractive: its memory is zero, so its feature is this, and the classifier looks for it
        padding = model.queries.enc_output_norm(model.queries.enc_output.bias)
        with torch.no_grad():
            model.heads.class_embed[-1].weight.copy_(padding.expand(5, -1))
        levels, memory = encoded(model, images)
        initial = model.queries(memory, levels, model.heads)
        chosen[exclude] = (initial.reference_points[1] == 1).all(-1).sum().item()
    assert chosen[False] > 0
    assert chosen[True] == 0


def encoded(model, images):
    """Levels and encoder memory of `images`."""
    caught = {}
    handle = model.queries.register_forward_pre_hook(
        lambda _, inputs: caught.update(memory=inputs[0], levels=inputs[1])
    )
    with torch.no_grad():
        model(images)
    handle.remove()
    return caught["levels"], caught["memory"]


def test_binary_and_max_class_scores_rank_differently(small_detector):
    torch.manual_seed(0)
    images = ImageBatch.from_images([torch.randint(0, 256, (3, 96, 128), dtype=torch.uint8)])
    model = small_detector(with_box_refine=True, two_stage=True)
    levels, memory = encoded(model, images)
    for score, key in (
        ("binary", lambda logits: logits[..., 0]),
        ("max_class", lambda logits: logits.amax(-1)),
    ):
        model.queries.proposal_score = score
        initial = model.queries(memory, levels, model.heads)
        best = key(initial.enc_outputs.pred_logits[0]).topk(model.num_queries).indices
        expected = initial.enc_outputs.pred_boxes[0][best]
        torch.testing.assert_close(initial.reference_points[0], expected)


def test_bfloat16_autocast_keeps_coordinates_in_float32(small_detector, batch):
    torch.manual_seed(0)
    model = small_detector(with_box_refine=True)
    data = batch()
    exact = model(data.images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(data.images)
    assert output.layer_boxes.dtype == torch.float32
    assert output.layer_logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.layer_boxes, exact.layer_boxes, atol=0.02, rtol=0)


def test_half_precision_and_double_models_run(small_detector, batch):
    data = batch()
    for dtype in (torch.bfloat16, torch.float64):
        output = small_detector().to(dtype)(data.images)
        assert output.layer_logits.dtype == dtype
        assert output.layer_boxes.isfinite().all()


class TestBadSettings:
    def test_two_stage_needs_refinement(self, small_detector):
        with pytest.raises(ValueError, match=r"two_stage=true needs with_box_refine=true"):
            small_detector(two_stage=True)

    def test_look_forward_twice_needs_refinement(self, small_detector):
        with pytest.raises(ValueError, match="look_forward_twice"):
            small_detector(look_forward_twice=True)

    def test_unknown_proposal_score(self, small_detector):
        with pytest.raises(ValueError, match="binary, max_class; got 'best'"):
            small_detector(with_box_refine=True, two_stage=True, proposal_score="best")

    def test_too_few_tokens_for_the_queries(self, small_detector, batch):
        model = small_detector(with_box_refine=True, two_stage=True, num_queries=5000)
        with pytest.raises(ValueError, match="num_queries=5000 proposals were asked of"):
            model(batch().images)

    def test_width_that_does_not_divide(self, small_detector):
        with pytest.raises(ValueError, match="d_model=40"):
            small_detector(d_model=40)

    @pytest.mark.parametrize("field", ["num_queries", "num_classes", "num_decoder_layers"])
    def test_zero_sizes(self, small_detector, field):
        with pytest.raises(ValueError, match=field):
            small_detector(**{field: 0})

    def test_no_levels(self, small_detector):
        with pytest.raises(ValueError, match="num_levels must be at least 1; got 0"):
            small_detector(num_levels=0)


def test_fewer_levels_than_features_use_the_coarsest(small_detector, batch):
    torch.manual_seed(0)
    three_features = small_detector(num_levels=1)
    torch.manual_seed(0)
    one_feature = small_detector(num_levels=1, out_indices=(4,))
    images = batch().images
    torch.testing.assert_close(three_features(images).layer_boxes, one_feature(images).layer_boxes)
