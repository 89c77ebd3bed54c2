"""Exported files say what the model says, at any batch size."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr.evaluation import PostProcess
from detr.inference.export import (
    ExportableDetector,
    check_exported,
    example_inputs,
    load_exported,
    require_exporter,
    trace,
    write_program,
)
from detr.inference.export_usage import exported_size, usage
from detr.models import Backbone, deformable_detr
from detr.structures import ImageBatch
from ops import KernelConfig

HEIGHT, WIDTH = 64, 96


@pytest.fixture(scope="module")
def exportable() -> ExportableDetector:
    torch.manual_seed(0)
    model = deformable_detr(
        Backbone("test_resnet", freeze_norm=True, out_indices=(4,)),
        num_classes=3,
        num_queries=5,
        num_levels=1,
        d_model=32,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dim_feedforward=32,
        with_box_refine=True,
        kernel=KernelConfig("reference"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return ExportableDetector(model.eval(), max_detections=10)


@pytest.fixture(scope="module")
def program(exportable: ExportableDetector):
    return trace(exportable, HEIGHT, WIDTH)


def test_detections_are_those_of_the_model(exportable: ExportableDetector):
    pixels, sizes = example_inputs(2, HEIGHT, WIDTH)
    images = [image[:, :h, :w] for image, (h, w) in zip(pixels, sizes.tolist(), strict=True)]
    with torch.no_grad():
        expected = PostProcess(10)(exportable.model(ImageBatch.from_images(images)), sizes)
        scores, labels, boxes = exportable(pixels, sizes)
    for index, detections in enumerate(expected):
        assert torch.equal(scores[index], detections.scores)
        assert torch.equal(labels[index], detections.labels)
        assert torch.equal(boxes[index], detections.boxes)


@pytest.mark.slow
def test_torch_export(exportable: ExportableDetector, program, tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "model.pt2"
    write_program(program, "torch_export", path)
    score, box = check_exported(exportable, load_exported("torch_export", path), HEIGHT, WIDTH, batch_sizes=(1, 3))
    assert score <= 1e-6
    assert box <= 1e-6
    # what the tool prints runs, and finds something on a photo of another shape
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((50, 200), 90).save("photo.jpg")
    Path("model.json").write_text(json.dumps({"classes": [{"name": name} for name in "abc"]}))
    exec(usage("torch_export", Path("model.pt2"), HEIGHT, WIDTH).replace("score >= 0.3", "score >= 0"))
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_a_file_that_differs_is_refused(exportable: ExportableDetector):
    def run(pixels: torch.Tensor, sizes: torch.Tensor):
        scores, labels, boxes = exportable(pixels, sizes)
        return scores, labels, boxes + 0.5

    with pytest.raises(ValueError, match="do not use it"):
        check_exported(exportable, run, HEIGHT, WIDTH, batch_sizes=(1,))


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="onnx, onnxscript and onnxruntime are not installed",
)
def test_onnx(exportable: ExportableDetector, program, tmp_path: Path):
    path = tmp_path / "model.onnx"
    write_program(program, "onnx", path)
    score, box = check_exported(exportable, load_exported("onnx", path), HEIGHT, WIDTH, batch_sizes=(1, 3))
    assert score <= 1e-4
    assert box <= 1e-4


def test_missing_packages_are_named(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"deformable-detr\[onnx\]"):
        write_program(program, "onnx", tmp_path / "model.onnx")
    with pytest.raises(ImportError, match=r"deformable-detr\[onnx\]"):
        require_exporter("onnx")
    require_exporter("torch_export")


@pytest.mark.parametrize(
    ("resize", "expected"),
    [
        ({"size": 800, "max_size": 1333}, (800, 1333)),
        ({"size": [64, 96], "max_size": None}, (64, 96)),
        ({"size": 320, "max_size": None}, (320, 320)),
    ],
)
def test_the_size_of_the_checkpoint(resize: dict, expected: tuple[int, int]):
    assert exported_size({"resize": resize}, None, None) == expected
    assert exported_size({"resize": resize}, 32, 48) == (32, 48)
    with pytest.raises(ValueError, match="or neither"):
        exported_size({"resize": resize}, 32, None)


def test_no_size_anywhere():
    native = {"resize": {"size": None, "max_size": None}}
    with pytest.raises(ValueError, match="as in height=480 width=640"):
        exported_size(native, None, None)
    for side in (0, -5, "abc", 2.5):
        with pytest.raises(ValueError, match="whole numbers of pixels above 0; got"):
            exported_size(native, side, 64)
