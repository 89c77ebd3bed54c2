"""Weights of other codebases from the command line."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr.checkpoints.convert import export_state
from detr.checkpoints.files import read_tensors
from detr.engine.checkpoint import load_checkpoint
from detr.inference.saved_model import Predictor
from detr.models import Backbone, deformable_detr

Tool = Callable[..., str]
MODEL = ("model=tiny", "backbone=resnet18", "backbone.name=test_resnet", "backbone.freeze=[]")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What the original saves: 91 rows, and a Namespace that nothing here can use."""
    torch.manual_seed(0)
    model = deformable_detr(
        Backbone("test_resnet"),
        num_classes=91,
        num_queries=50,
        num_levels=3,
        d_model=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=3,
        dim_feedforward=128,
        with_box_refine=True,
    )
    with torch.no_grad():
        for head in model.heads.bbox_embed:
            head.last_layer.weight.normal_()
    content = {"model": export_state(model.state_dict(), "original", with_box_refine=True)}
    torch.save({**content, "args": argparse.Namespace(lr=2e-4), "epoch": 49}, tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def test_there_and_back_and_used(tool: Tool, refused: Tool, file: Path, tmp_path: Path):
    out = tool("import_weights", "source=original", f"file={file}", *MODEL, "data.root=null", "rows=all")
    assert "91 classes" in out
    imported = tmp_path / "outputs" / "import_weights" / "imported.pt"
    out = tool("import_weights", "source=ours", f"file={imported}", "to=original", "name=back")
    back = read_tensors(tmp_path / "outputs" / "back" / "original.pth")
    theirs = read_tensors(file)
    assert set(back) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(back[name], tensor), name

    out = tool("import_weights", "source=original", f"file={file}", *MODEL, "name=named")
    assert "91 rows became 80, by class name" in out
    checkpoint = load_checkpoint(tmp_path / "outputs" / "named" / "imported.pt")
    assert checkpoint.class_table.names[79] == "toothbrush"
    assert checkpoint.class_table.category_ids[79] == 90
    Image.new("RGB", (70, 50), "navy").save(tmp_path / "a.png")
    tool("predict", "checkpoint=outputs/named/imported.pt", "source=a.png", "threshold=0", "device=cpu")
    # the same detections in three lines of Python
    rows = json.loads((tmp_path / "outputs" / "predict_a" / "predictions.json").read_text())
    predictor = Predictor(imported.parent.parent / "named" / "imported.pt", device="cpu")
    found = predictor("a.png", threshold=0)
    assert [each.category_id for each in found[: len(rows)]] == [row["category_id"] for row in rows]
    assert [each.name for each in found[: len(rows)]] == [row["category_name"] for row in rows]
    x, y, w, h = rows[0]["bbox"]
    assert found[0].box == pytest.approx((x, y, x + w, y + h), abs=1e-3)
    assert found[0].score == pytest.approx(rows[0]["score"], abs=1e-5)
    only = predictor(torch.zeros(3, 50, 70, dtype=torch.uint8), threshold=0, classes=[rows[0]["category_name"]])
    assert {each.name for each in only} == {rows[0]["category_name"]}
    assert "give another name=" in refused("import_weights", "source=original", f"file={file}", *MODEL, "name=named")


def test_what_is_refused(refused: Tool, file: Path, tmp_path: Path):
    message = refused("import_weights", "source=hf", f"file={file}", *MODEL)
    assert "use source=original" in message
    message = refused("import_weights", "source=original", f"file={file}", *MODEL, "model.num_queries=9")
    assert "add model.num_queries=50" in message
    assert not (tmp_path / "outputs").exists()
    assert "needs file=FILE" in refused("import_weights", "source=original")
