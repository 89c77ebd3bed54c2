"""The criterion against a plain loop over layers and images."""

import pytest
import torch
from torchvision.ops import box_convert, generalized_box_iou, sigmoid_focal_loss

from detr.losses import HungarianMatcher, MatchingProblem, PaddedTargets, SetCriterion
from detr.structures import DetectorOutput, LayerOutput, Target


def make_output(num_layers=3, num_images=2, num_queries=6, num_classes=4, *, proposals=0) -> DetectorOutput:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    def rand(*shape):
        return (torch.rand(*shape, generator=generator) * 0.4 + 0.1).requires_grad_()

    enc = None
    if proposals:
        enc = LayerOutput(randn(num_images, proposals, num_classes), rand(num_images, proposals, 4))
    return DetectorOutput(
        randn(num_layers, num_images, num_queries, num_classes),
        rand(num_layers, num_images, num_queries, 4),
        enc,
    )


def make_targets(counts=(3, 0), num_classes=4) -> list[Target]:
    generator = torch.Generator().manual_seed(1)
    return [
        Target(
            torch.randint(0, num_classes, (count,), generator=generator),
            torch.rand(count, 4, generator=generator) * 0.4 + 0.1,
            image_id=index,
            orig_size=(60, 80),
        )
        for index, count in enumerate(counts)
    ]


def make_criterion(**settings) -> SetCriterion:
    return SetCriterion(num_classes=4, matcher=HungarianMatcher(), **settings)


def plain_terms(logits, boxes, targets, num_boxes):
    """One layer's terms, an image at a time; logits (N, Lq, C), boxes (N, Lq, 4)."""
    totals = {"loss_ce": 0.0, "loss_bbox": 0.0, "loss_giou": 0.0}
    for index, target in enumerate(targets):
        matcher = HungarianMatcher()
        padded = PaddedTargets.from_targets([target], logits.device)
        matches = matcher(MatchingProblem(logits[None, index : index + 1], boxes[None, index : index + 1], padded))
        query, row = matches.query[0], matches.target[0]
        one_hot = torch.zeros_like(logits[index])
        one_hot[query, target.labels[row]] = 1
        totals["loss_ce"] += sigmoid_focal_loss(logits[index], one_hot, alpha=0.25, gamma=2.0).sum() / num_boxes
        pairs = boxes[index, query], target.boxes[row]
        totals["loss_bbox"] += (pairs[0] - pairs[1]).abs().sum() / num_boxes
        xyxy = [box_convert(pair, "cxcywh", "xyxy") for pair in pairs]
        totals["loss_giou"] += (1 - generalized_box_iou(*xyxy).diag()).sum() / num_boxes
    return totals


@pytest.mark.parametrize("counts", [(3, 0), (0, 0), (2, 5)], ids=str)
def test_terms_are_the_plain_ones(counts):
    output, targets = make_output(proposals=9), make_targets(counts)
    loss = make_criterion()(output, targets, 3.0)
    objects = [Target(torch.zeros_like(t.labels), t.boxes, t.image_id, t.orig_size) for t in targets]
    expected_total = 0
    for layer, suffix in enumerate(["_0", "_1", ""]):
        expected = plain_terms(output.layer_logits[layer], output.layer_boxes[layer], targets, 3.0)
        for name, value in expected.items():
            torch.testing.assert_close(loss.terms[name + suffix], torch.as_tensor(value))
        expected_total += 2 * expected["loss_ce"] + 5 * expected["loss_bbox"] + 2 * expected["loss_giou"]
    expected = plain_terms(output.enc_outputs.pred_logits, output.enc_outputs.pred_boxes, objects, 3.0)
    for name, value in expected.items():
        torch.testing.assert_close(loss.terms[name + "_enc"], torch.as_tensor(value))
    expected_total += 2 * expected["loss_ce"] + 5 * expected["loss_bbox"] + 2 * expected["loss_giou"]
    torch.testing.assert_close(loss.total, expected_total)
    assert len(loss.terms) == 12


def test_weights_scale_their_terms():
    output, targets = make_output(), make_targets()
    only = {
        name: make_criterion(**{f"weight_{key}": 0.0 for key in ("ce", "bbox", "giou") if key != name})
        for name in ("ce", "bbox", "giou")
    }
    parts = sum(criterion(output, targets, 3.0).total for criterion in only.values())
    torch.testing.assert_close(parts, make_criterion()(output, targets, 3.0).total)


def test_without_aux_loss_only_the_last_layer_counts():
    output, targets = make_output(), make_targets()
    loss = make_criterion(aux_loss=False)(output, targets, 3.0)
    assert set(loss.terms) == {"loss_ce", "loss_bbox", "loss_giou"}
    loss.total.backward()
    assert output.layer_logits.grad[:-1].abs().sum() == 0
    assert output.layer_logits.grad[-1].abs().sum() > 0


def test_num_boxes_as_tensor_or_number():
    output, targets = make_output(), make_targets()
    criterion = make_criterion()
    torch.testing.assert_close(
        criterion(output, targets, torch.tensor(3.0)).total, criterion(output, targets, 3.0).total
    )


def test_images_without_boxes_push_all_scores_down():
    output, targets = make_output(), make_targets((0, 0))
    loss = make_criterion()(output, targets, 1.0)
    loss.total.backward()
    assert loss.terms["loss_bbox"] == loss.terms["loss_giou"] == 0
    assert (output.layer_logits.grad > 0).all()
    assert loss.class_error == 0


def test_bfloat16_outputs_lose_no_more_than_their_rounding():
    """The criterion computes in float32: its value equals that of the rounded outputs taken to float32."""
    output, targets = make_output(), make_targets()
    rounded = DetectorOutput(output.layer_logits.bfloat16(), output.layer_boxes)
    widened = DetectorOutput(rounded.layer_logits.float(), rounded.layer_boxes)
    criterion = make_criterion()
    loss = criterion(rounded, targets, 3.0).total
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, criterion(widened, targets, 3.0).total)


def test_float64_stays_float64():
    output = make_output()
    double = DetectorOutput(output.layer_logits.double(), output.layer_boxes.double())
    assert make_criterion()(double, make_targets(), 3.0).total.dtype == torch.float64


def test_degenerate_boxes_give_finite_gradients():
    boxes = torch.tensor([[[[0.5, 0.5, 0.0, 0.0]]]], requires_grad=True)
    output = DetectorOutput(torch.zeros(1, 1, 1, 4, requires_grad=True), boxes)
    target = Target(torch.tensor([0]), torch.tensor([[0.5, 0.5, 0.0, 0.0]]), 0, (10, 10))
    loss = make_criterion()(output, [target], 1.0)
    loss.total.backward()
    assert loss.total.isfinite()
    assert boxes.grad.isfinite().all()


class TestBadInput:
    def test_other_number_of_classes(self):
        with pytest.raises(ValueError, match="the model has 7 classes, the criterion 4"):
            make_criterion()(make_output(num_classes=7), make_targets(), 1.0)

    def test_other_number_of_images(self):
        with pytest.raises(ValueError, match="got 2 images and 1 targets"):
            make_criterion()(make_output(), make_targets((1,)), 1.0)

    def test_label_outside_the_classes(self):
        targets = make_targets((2, 1), num_classes=4)
        targets[0].labels[1] = 11
        with pytest.raises(ValueError, match="image 0: label 1 is 11"):
            make_criterion()(make_output(), targets, 1.0)
