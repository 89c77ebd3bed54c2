"""Parity with the original implementation on its dumped tensors (fp32)."""

import pytest
import torch

from detr.boxes import inverse_sigmoid
from detr.checkpoints.original import from_original, name_to_original
from detr.losses import HungarianMatcher, MatchingProblem, PaddedTargets, SetCriterion
from detr.models.build import deformable_detr
from detr.models.deformable_detr import DeformableDETR
from detr.models.levels import LevelGeometry
from detr.models.position_encoding import sine_position_encoding
from detr.structures import DetectorOutput, Target

RELATIVE = 1e-4


def build(variant: str, golden, given_features) -> DeformableDETR:
    channels = [int(c) for c in golden.sizes["backbone_channels"].split(",")]
    strides = [int(s) for s in golden.sizes["strides"].split(",")]
    model = deformable_detr(
        given_features(channels, strides),
        num_classes=golden.int("num_classes"),
        num_queries=golden.int("num_queries"),
        num_levels=golden.int("num_feature_levels"),
        d_model=golden.int("d_model"),
        num_heads=golden.int("nhead"),
        num_encoder_layers=golden.int("enc_layers"),
        num_decoder_layers=golden.int("dec_layers"),
        dim_feedforward=golden.int("dim_feedforward"),
        dropout=float(golden.sizes["dropout"]),
        num_encoder_points=golden.int("enc_n_points"),
        num_decoder_points=golden.int("dec_n_points"),
        with_box_refine=variant != "plain",
        two_stage=variant == "two_stage",
    )
    weights = from_original(golden.under("param/"), shared_heads=variant == "plain")
    model.load_state_dict(weights, strict=True)
    return model


@pytest.fixture(scope="module")
def run(golden, given_features) -> tuple[str, object, DeformableDETR, DetectorOutput]:
    variant, tensors = golden
    model = build(variant, tensors, given_features)
    output = model.forward_features([tensors[f"in/feature_{i}"] for i in range(3)], tensors["in/padding_mask"])
    return variant, tensors, model, output


def targets_of(golden) -> list[Target]:
    sizes = [tuple(int(side) for side in size.split("x")) for size in golden.sizes["image_sizes_hw"].split(",")]
    return [
        Target(golden[f"target/{i}/labels"], golden[f"target/{i}/boxes"], image_id=i, orig_size=size)
        for i, size in enumerate(sizes)
    ]


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    assert error <= relative, f"{name}: relative error {error:.2e}"


def test_masks_and_position_encoding(golden):
    _, tensors = golden
    features = [tensors[f"in/feature_{i}"] for i in range(3)]
    levels = LevelGeometry.from_padding_mask(tensors["in/padding_mask"], features)
    for i in range(3):
        assert torch.equal(levels.padding_masks[i], tensors[f"mid/mask_{i}"])
        encoding = sine_position_encoding(levels.padding_masks[i], tensors.int("d_model"))
        expected = tensors[f"mid/pos_{i}"].flatten(2).transpose(1, 2)
        valid = ~levels.padding_masks[i].flatten(1)
        # padded cells reach millions of radians, where float32 holds no phase
        assert_close(f"pos_{i}", encoding[valid], expected[valid])


def test_outputs(run):
    _, tensors, _, output = run
    assert_close("pred_logits", output.pred_logits, tensors["out/pred_logits"])
    assert_close("pred_boxes", output.pred_boxes, tensors["out/pred_boxes"])
    assert len(output.aux_outputs) == tensors.int("dec_layers") - 1
    for i, aux in enumerate(output.aux_outputs):
        assert_close(f"aux_{i} logits", aux.pred_logits, tensors[f"out/aux_{i}/pred_logits"])
        assert_close(f"aux_{i} boxes", aux.pred_boxes, tensors[f"out/aux_{i}/pred_boxes"])


def test_proposals(run):
    variant, tensors, _, output = run
    if variant != "two_stage":
        assert output.enc_outputs is None
        return
    assert_close("enc logits", output.enc_outputs.pred_logits, tensors["out/enc/pred_logits"])
    assert_close("enc boxes", output.enc_outputs.pred_boxes, tensors["out/enc/pred_boxes"])


def test_top_100(run):
    _, tensors, _, output = run
    for i in range(2):
        scores, index = output.pred_logits[i].sigmoid().flatten().topk(100)
        assert_close("scores", scores, tensors[f"post/{i}/scores"])
        assert torch.equal(index % output.pred_logits.shape[-1], tensors[f"post/{i}/labels"])


def test_matches(run):
    _, tensors, _, output = run
    padded = PaddedTargets.from_targets(targets_of(tensors), torch.device("cpu"))
    matches = HungarianMatcher()(MatchingProblem(output.layer_logits, output.layer_boxes, padded))
    for i in range(2):
        of_image = matches.image == i
        assert torch.equal(matches.query[-1, of_image], tensors[f"match/{i}/query"])
        assert torch.equal(matches.target[-1, of_image], tensors[f"match/{i}/target"])


def test_losses_and_gradients(run):
    _, tensors, model, output = run
    targets = targets_of(tensors)
    criterion = SetCriterion(num_classes=tensors.int("num_classes"), matcher=HungarianMatcher())
    loss = criterion(output, targets, float(sum(len(target.labels) for target in targets)))
    expected = tensors.under("loss/")
    names = {name for name in expected if name.startswith("loss_")}
    assert set(loss.terms) == names
    for name in names:
        assert_close(name, loss.terms[name], expected[name])
    assert_close("total", loss.total, expected["total"])
    assert_close("class_error", loss.class_error, expected["class_error"])

    model.zero_grad()
    loss.total.backward(retain_graph=True)
    gradients = tensors.under("grad/")
    compared = 0
    for name, parameter in model.named_parameters():
        original = name_to_original(name)
        if original not in gradients:
            continue
        found, wanted = parameter.grad, gradients[original]
        assert found is not None, f"{name} has no gradient"
        bound = 1e-3 * wanted.abs().max() + 1e-7
        error = (found - wanted).abs().max()
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
        compared += 1
    assert compared == len(gradients)


def test_inverse_sigmoid_is_the_original_clamp():
    ends = inverse_sigmoid(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]))
    bound = torch.log(torch.tensor(1e5))
    torch.testing.assert_close(ends, torch.stack((-bound, -bound, torch.zeros(()), bound, bound)))
