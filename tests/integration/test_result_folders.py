"""Tools that are given a checkpoint or images: each result has a folder, and none takes the place of another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from detr.data import SyntheticDataset, flip_and_resize

Tool = Callable[..., str]


def test_each_source_has_a_folder_and_nothing_is_overwritten(
    tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path
):
    tool("train", *tiny)
    for name in ("photos.v2", "more"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (70, 50), "navy").save(tmp_path / name / "a.png")
    common = ("predict", "checkpoint=outputs/debug_cpu/best.pt", "threshold=0")
    for source, folder in {
        "photos.v2/": "predict_photos.v2",
        "more/*.png": "predict_more",
        "more/a.png": "predict_a",
        str(tmp_path / "**" / "*.png"): f"predict_{tmp_path.name}",
    }.items():
        tool(*common, f"source='{source}'")
        assert (tmp_path / "outputs" / folder / "predictions.json").is_file()
    before = (tmp_path / "outputs/predict_more/predictions.json").read_bytes()
    # the same again may be repeated, what differs may not take its place
    tool(*common, "source='more/*.png'")
    message = refused(*common, "source=more")
    assert "outputs/predict_more already holds a different run" in message
    assert "source: more/*.png -> more" in message
    assert "name=predict_more_2" in message
    assert (tmp_path / "outputs/predict_more/predictions.json").read_bytes() == before
    tool(*common, "source=more", "name=chosen")
    assert (tmp_path / "outputs/chosen/predictions.json").is_file()


def test_each_evaluation_has_a_folder(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny)
    for name in ("more", "photos.v2"):
        SyntheticDataset("val", flip_and_resize(None), num_images=2, size=64).write_coco(tmp_path / name)
    shutil.copytree("outputs/debug_cpu", "outputs/second run")
    shutil.copyfile("outputs/debug_cpu/best.pt", "weights.v1.pt")
    others = ("data=coco", "data.num_workers=0", "data.train=${data.val}")
    annotations = "annotations/instances_val.json"
    found = "detections=outputs/evaluate_debug_cpu_best/detections.json"
    commands = {
        "debug_cpu_best": ("checkpoint=outputs/debug_cpu/best.pt",),
        "debug_cpu_last": ("checkpoint=outputs/debug_cpu/last.pt",),
        "second run_best": ("checkpoint='outputs/second run/best.pt'",),
        "weights.v1": ("checkpoint=weights.v1.pt",),
        "weights.v1_synthetic": ("checkpoint=weights.v1.pt", "data=synthetic", "data.size=64", "data.num_val_images=2"),
        "weights.v1_more": ("checkpoint=weights.v1.pt", *others, "data.root=more"),
        "weights.v1_photos.v2": ("checkpoint=weights.v1.pt", *others, "data.root=photos.v2/"),
        "weights.v1_more_instances_val": (
            *("checkpoint=weights.v1.pt", *others, "data.root=more", f"data.val.annotations=more/{annotations}"),
        ),
        "evaluate_debug_cpu_best_detections_gt": (found, "data.val.annotations=gt.json"),
    }
    for name, overrides in commands.items():
        if overrides[0] == found:
            shutil.copyfile("outputs/evaluate_debug_cpu_best/ground_truth.json", "gt.json")
        tool("evaluate", *overrides)
        assert (tmp_path / "outputs" / f"evaluate_{name}" / "metrics.json").is_file(), name
    # of the same files, but not the same
    message = refused("evaluate", "checkpoint=weights.v1.pt", "data.batch_size=3")
    assert "outputs/evaluate_weights.v1 already holds a different run" in message
    assert "data.batch_size: " in message
    tool("evaluate", "checkpoint=weights.v1.pt", "name=chosen")
    tool("evaluate", "checkpoint=weights.v1.pt", "output_dir=there")
    assert (tmp_path / "outputs/chosen/metrics.json").is_file()
    assert (tmp_path / "there/metrics.json").is_file()
    tool("analyze", "evaluation=outputs/evaluate_debug_cpu_best")
    tool("analyze", found, "annotations=gt.json")
    for name in ("evaluate_debug_cpu_best", "evaluate_debug_cpu_best_detections_gt"):
        assert (tmp_path / "outputs" / f"analyze_{name}" / "report.html").is_file()


def test_each_inspection_has_a_folder(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny)
    for name in ("photos", "more"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (70, 50), "navy").save(tmp_path / name / "a.png")
    folders = []
    for weights in ("best", "last"):
        for source in ("photos/", "'more/*.png'"):
            tool("inspect_attention", f"checkpoint=outputs/debug_cpu/{weights}.pt", f"source={source}")
            folders.append(f"inspect_attention_debug_cpu_{weights}_{'photos' if 'photos' in source else 'more'}")
    for name in folders:
        content = json.loads((tmp_path / "outputs" / name / "sampling.json").read_text())
        assert content["checkpoint"] == f"outputs/debug_cpu/{'best' if 'best' in name else 'last'}.pt"
    # pictures of another layer go beside the others, other statistics do not take the place of these
    again = ("inspect_attention", "checkpoint=outputs/debug_cpu/best.pt", "source=photos/")
    tool(*again, "layer=encoder.layers.0", "query=3")
    folder = tmp_path / "outputs" / folders[0]
    assert len(list(folder.glob("*.png"))) == 2
    before = (folder / "sampling.json").read_bytes()
    assert "precision" in refused(*again, "precision=bf16")
    assert "num_images: 100 -> 1" in refused(*again, "num_images=1")
    assert (folder / "sampling.json").read_bytes() == before


@pytest.mark.parametrize("tool_name", ["predict", "inspect_attention", "evaluate", "analyze"])
def test_what_is_missing_is_said_before_what_it_would_be_called(refused: Tool, tool_name: str):
    assert f"tools/{tool_name}.py " in refused(tool_name)
