"""What tools/train.py looks at before it trains: what it refuses, and which folder it takes."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from detr.engine.run_lock import LOCK, RunLock

Tool = Callable[..., str]
COCO_RUN = ("data=coco", "data.root=coco", "data.num_workers=0", "backbone.name=test_resnet", "device=cpu")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=coco", "data.root=nowhere"], ["data: coco_data() got an unexpected keyword argument", "experiment"]),
        (["data.num_train_images=3"], ["one training step takes 4 images", "has 3"]),
        (["device=cuda"], ["device=cuda needs a CUDA GPU"]),
        (["precision=fp16"], ["precision=fp16 needs a CUDA device"]),
        (["init_from=nothing.pt"], ["no checkpoint at nothing.pt"]),
        (["resume=nothing.pt"], ["resume=nothing.pt: no such checkpoint"]),
        (["backbone.name=resnet1"], ["backbone.name='resnet1' is not a timm model"]),
        (["kernel.backend=fast"], ["KernelConfig.backend must be one of"]),
        (["trainer.clip=nan"], ["trainer.clip is a number"]),
        (["trainer.accumulate=0"], ["trainer.accumulate must be at least 1"]),
        (["model.two_stage=true", "model.with_box_refine=false"], ["two_stage=true needs with_box_refine=true"]),
        (["+trainer.speed=9"], ["unexpected keyword argument 'speed'"]),
        (["trainer.log_evry=1"], ["did you mean trainer.log_every?"]),
    ],
)
def test_bad_input_is_one_error_before_training(
    refused: Tool, tiny: tuple[str, ...], tmp_path: Path, overrides: list[str], words: list[str]
):
    if "device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    message = refused("train", *tiny, *overrides)
    for word in words:
        assert word in message
    assert not list(tmp_path.iterdir())


def write_annotations(folder: Path, **changes: Any) -> None:
    """A COCO dataset of six images with one box each, and what `changes` breaks."""
    annotations = [
        {"id": 10 + index, "image_id": index, "category_id": 3, "bbox": [5, 5, 20, 20]} for index in range(6)
    ]
    dataset = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 48, "height": 48} for i in range(6)],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "cat"}],
    }
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        (folder / "annotations").mkdir(exist_ok=True)
        for index in range(6):
            Image.new("RGB", (48, 48)).save(folder / split / f"{index}.png")
        text = json.dumps(dataset)
        (folder / "annotations" / f"instances_{split}.json").write_text(text)
    dataset.update({key: value for key, value in changes.items() if key in dataset})
    annotations[2].update(changes.get("annotation", {}))
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(dataset))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"annotation": {"bbox": [float("nan"), 0, 5, 5]}}, ["12"]),
        ({"annotation": {"category_id": 4}}, ["12", "4"]),
        ({"images": [], "annotations": []}, ["no images"]),
    ],
)
def test_faulty_datasets_stop_before_training(refused: Tool, tmp_path: Path, changes: Any, words: list[str]):
    write_annotations(tmp_path / "coco", **changes)
    message = refused("train", *COCO_RUN)
    for word in words:
        assert word in message
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (["data.root=cells"], "cells"),
        (["data.root=cells", "name=mine"], "mine"),
        (["data.root=cells", "output_dir=there"], "there"),
        (["data.root=cells", "experiment=bccd_lite0"], "bccd_lite0"),
        (
            [
                "data.train.annotations=cells/annotations/instances_train.json",
                "data.train.images=cells/train",
                "data.val.annotations=cells/annotations/instances_val.json",
                "data.val.images=cells/val",
            ],
            "instances_train",
        ),
    ],
)
@pytest.mark.parametrize("data", ["coco", "custom"])
def test_a_run_on_own_data_is_named_after_it(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, overrides: list[str], folder: str
):
    """The folder alone is looked at: training is left out."""
    from tools import train

    write_annotations(tmp_path / "cells")
    monkeypatch.setattr(train, "train", lambda cfg, *_: print(f"to {cfg.output_dir}"))
    out = tool("train", f"data={data}", "device=cpu", *overrides)
    assert f"to {folder if folder == 'there' else 'outputs/' + folder}\n" in out
    assert "to outputs/tiny_synthetic\n" in tool("train", "device=cpu")


def test_a_wrong_path_names_it(refused: Tool):
    assert "data.root=coco is not a folder" in refused("train", *COCO_RUN)


def test_a_different_run_is_refused_and_loses_nothing(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny)
    folder = tmp_path / "outputs" / "debug_cpu"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = refused("train", *tiny, "optimizer.lr=0.1")
    assert "optimizer.lr: 0.0012 -> 0.1" in message
    assert "resume=never" in refused("train", *tiny, "resume=never")
    assert "checkpoint" in refused("evaluate", "checkpoint=outputs/debug_cpu/last.pt", "name=debug_cpu")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_in_which_another_process_trains_is_refused(
    refused: Tool, tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hold = "import sys, pathlib; from detr.engine.run_lock import RunLock; lock = RunLock(pathlib.Path(sys.argv[1]))"
    hold += "; lock.acquire(); print('held', flush=True); input()"
    folder = tmp_path / "outputs" / "debug_cpu"
    monkeypatch.setattr("tools.train.RunLock", functools.partial(RunLock, wait_here_s=0.1))
    with subprocess.Popen([sys.executable, "-c", hold, str(folder)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = refused("train", *tiny)
        holder.communicate("\n")
    assert f"is being trained by process {holder.pid}" in message
    assert [path.name for path in folder.iterdir()] == [LOCK]


def test_evaluate_needs_one_source(refused: Tool):
    assert "takes checkpoint=FILE, or detections=FILE" in refused("evaluate")
    assert "data.val.annotations=FILE" in refused("evaluate", "detections=x.json")
    assert "needs checkpoint=FILE and source=" in refused("predict")
