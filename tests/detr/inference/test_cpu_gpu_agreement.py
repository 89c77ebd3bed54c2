"""Predictions on a CPU and on a GPU agree, on real images: fp32 with TF32 off.

    pytest -m gpu tests/detr/inference/test_cpu_gpu_agreement.py

The model has an ImageNet backbone, random heads, and a class bias at which some dozens of detections an image are above
the threshold: no training is needed, and every layer has something to get wrong.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from detr.engine.precision import Precision
from detr.evaluation import PostProcess
from detr.inference.image_sources import read_images
from detr.inference.predict import Prediction, predict
from detr.models import Backbone, deformable_detr
from detr.structures import Detections
from ops import KernelConfig

MIN_SCORE = 0.3
SCORE_TOLERANCE = 1e-3
BOX_TOLERANCE_PX = 0.5
LEAST_DETECTIONS = 20
CPU = torch.device("cpu")
WEIGHTS = "weights/tf_efficientnet_lite0.fp16.safetensors"


def make_model(
    shared_dir: Path, backend: str, *, refine: bool, class_bias: float = -7.0, num_layers: int = 6
) -> nn.Module:
    """A detector of the paper's sizes whose heads say something; the same weights for every backend."""
    torch.manual_seed(0)
    backbone = Backbone("tf_efficientnet_lite0", pretrained=str(shared_dir / WEIGHTS))
    model = deformable_detr(
        backbone,
        num_classes=5,
        num_encoder_layers=num_layers,
        num_decoder_layers=num_layers,
        with_box_refine=refine,
        kernel=KernelConfig(backend),
    )
    with torch.no_grad():
        for name, parameter in model.heads.named_parameters():
            if name.startswith("class_embed"):
                parameter.normal_(0, 0.2) if name.endswith("weight") else parameter.fill_(class_bias)
            elif name.endswith("layers.2.weight"):
                parameter.normal_(0, 0.02)
    return model.eval()


def real_images(shared_dir: Path, num_each: int) -> list[Path]:
    data = shared_dir / "data"
    photos = sorted((data / "coco-mini" / "val2017").glob("*.jpg"))[:num_each]
    cells = sorted(path for path in (data / "bccd" / "val").iterdir() if path.suffix in (".jpg", ".jpeg", ".png"))
    return photos + cells[:num_each]


def predictions_on(
    model: nn.Module,
    paths: Sequence[Path],
    device: torch.device,
    *,
    size: int,
    # a score at the threshold may lie on either side of it
    min_score: float = MIN_SCORE - SCORE_TOLERANCE,
) -> list[Prediction]:
    precision = Precision("fp32")
    precision.prepare(device)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    skipped: list[Any] = []
    found = predict(
        model.to(device),
        read_images(paths, apply_exif=True, skipped=skipped),
        PostProcess(300),
        preprocessing={"resize": {"size": size, "max_size": 1333}, "pad_to": 1},
        min_score=min_score,
        batch_size=1,
        precision=precision,
        device=device,
        skipped=skipped,
    )
    predictions = list(found)
    assert not skipped
    return predictions


def fitting_bias(shared_dir: Path, paths: Sequence[Path], *, size: int, **settings: Any) -> float:
    """The class bias at which 40 detections an image are above the threshold, on average."""
    model = make_model(shared_dir, "reference", class_bias=-7.0, **settings)
    found = predictions_on(model, paths, CPU, size=size, min_score=0.0)
    logits = torch.cat([each.detections.scores for each in found]).double().logit().sort(descending=True).values
    threshold = torch.tensor(MIN_SCORE).logit() - logits[40 * len(paths)]
    return -7.0 + float(threshold)


def differences(one: Detections, other: Detections) -> list[str]:
    """The detections of `one` above the threshold without an equal in `other`; each serves once."""
    free = list(range(len(other.scores)))
    unmatched = []
    for score, label, box in zip(one.scores, one.labels, one.boxes, strict=True):
        if score <= MIN_SCORE:
            continue
        fits = [
            index
            for index in free
            if other.labels[index] == label
            and (other.scores[index] - score).abs() <= SCORE_TOLERANCE
            and (other.boxes[index] - box).abs().max() <= BOX_TOLERANCE_PX
        ]
        if fits:
            free.remove(fits[0])
        else:
            unmatched.append(f"class {int(label)}, score {float(score):.4f}, box {[round(x, 2) for x in box.tolist()]}")
    return unmatched


def assert_agree(first: Sequence[Prediction], second: Sequence[Prediction]) -> None:
    num_compared = 0
    for one, other in zip(first, second, strict=True):
        assert one.source.path == other.source.path
        for name, left, right in (("only the first", one, other), ("only the second", other, one)):
            unmatched = differences(left.detections, right.detections)
            assert not unmatched, f"{one.source.path.name}, {name}: {'; '.join(unmatched[:3])}"
        num_compared += int((one.detections.scores > MIN_SCORE).sum())
    assert num_compared > LEAST_DETECTIONS


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "refine"])
def on_cpu(request: pytest.FixtureRequest, shared_dir: Path) -> tuple[dict[str, Any], list[Prediction]]:
    """How the model is made, and what it finds with PyTorch alone."""
    torch.set_num_threads(8)
    paths = real_images(shared_dir, 5)
    settings = {"refine": request.param}
    settings["class_bias"] = fitting_bias(shared_dir, paths, size=800, **settings)
    return settings, predictions_on(make_model(shared_dir, "reference", **settings), paths, CPU, size=800)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_cpu_and_gpu_agree(shared_dir: Path, on_cpu: tuple[dict[str, Any], list[Prediction]], backend: str):
    settings, predictions = on_cpu
    model = make_model(shared_dir, backend, **settings)
    paths = [each.source.path for each in predictions]
    assert_agree(predictions, predictions_on(model, paths, torch.device("cuda"), size=800))


def test_the_comparison_has_enough_to_compare_and_sees_a_difference(shared_dir: Path):
    paths = real_images(shared_dir, 1)
    settings = {"refine": True, "num_layers": 1}
    bias = fitting_bias(shared_dir, paths, size=200, **settings)
    model = make_model(shared_dir, "reference", class_bias=bias, **settings)
    found = predictions_on(model, paths, CPU, size=200)
    # rounded differently
    with torch.backends.mkldnn.flags(enabled=False):
        again = predictions_on(model, paths, CPU, size=200)
    assert_agree(found, again)
    boxes = [each.detections.boxes for each in found]
    assert all(len(each.unique(dim=0)) > 5 for each in boxes)
    for change in (
        lambda detections: replace(detections, boxes=detections.boxes + 0.6),
        lambda detections: replace(detections, scores=detections.scores + 2e-3),
        lambda detections: replace(detections, labels=(detections.labels + 1) % 5),
        lambda detections: Detections(detections.scores[1:], detections.labels[1:], detections.boxes[1:]),
    ):
        changed = [replace(each, detections=change(each.detections)) for each in found]
        with pytest.raises(AssertionError, match="only the"):
            assert_agree(found, changed)
    with pytest.raises(AssertionError):
        assert_agree([], [])
