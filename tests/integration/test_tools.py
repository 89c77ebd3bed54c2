"""Train, resume, evaluate and predict from the command line."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from detr.data import SyntheticDataset, flip_and_resize
from detr.engine.checkpoint import load_checkpoint, save_checkpoint

Tool = Callable[..., str]
# a dataset on disk, one epoch, a small model
COCO_RUN = (
    "data=coco",
    "data.root=coco",
    "data.num_workers=0",
    "backbone.name=test_resnet",
    "device=cpu",
    "schedule.epochs=1",
    "name=own",
)
COCO_KEYS = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl", "per_class"]


def test_train_evaluate_predict(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    out = tool("train", *tiny)
    assert "precision" in out
    assert "outputs/debug_cpu: epoch 1, AP" in out
    run = tmp_path / "outputs" / "debug_cpu"
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "environment.json", "metrics.jsonl", "last.pt"}
    # nothing of Hydra's, and nothing beside the run
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]

    out = tool("evaluate", "checkpoint=outputs/debug_cpu/best.pt")
    assert "max 100 detections" in out
    metrics = json.loads((tmp_path / "outputs" / "evaluate_debug_cpu_best" / "metrics.json").read_text())
    assert list(metrics) == COCO_KEYS
    assert metrics == json.loads((run / "metrics.json").read_text())

    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (70, 50), "navy").save(photos / "a.png")
    tool("predict", "checkpoint=outputs/debug_cpu/best.pt", "source=photos", "threshold=0", "output_dir=found")
    rows = json.loads((tmp_path / "found" / "predictions.json").read_text())
    table = load_checkpoint(run / "best.pt").class_table
    assert len(rows) == 100
    for row in rows:
        assert row["file_name"] == "a.png"
        assert table.names[table.category_ids.index(row["category_id"])] == row["category_name"]
    assert (tmp_path / "found" / "a.png").is_file()
    common = ("predict", "checkpoint=outputs/debug_cpu/best.pt", "source=photos")
    # a single name is a list of one
    tool(*common, f"classes={table.names[0]}", "threshold=0", "name=one")
    rows = json.loads((tmp_path / "outputs" / "one" / "predictions.json").read_text())
    assert {row["category_name"] for row in rows} == {table.names[0]}
    for overrides, words in (
        (["source=nope.jpg"], "source=nope.jpg is neither an image nor a folder"),
        (["checkpoint=outputs/debug_cpu"], "that folder has best.pt, last.pt"),
        (["top_k=0"], "top_k and batch_size must be at least 1"),
        (["classes=[person]"], "there is no class 'person'"),
        # the inputs are right, but the folder has other results
        (["threshold=0.9"], "Give the settings of that run, or another name= (such as name=found_2)"),
        (["treshold=0.9"], "did you mean threshold?"),
        (["threshold=30"], "a score in [0, 1], such as 0.3 for 30%; got 30"),
    ):
        assert words in refused(*common, "output_dir=found", *overrides)
    assert "optimizer" not in refused(*common, "treshold=0.9")


def test_predict_on_a_video(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    pytest.importorskip("av")
    from detr.inference.video import VideoWriter, video_info

    with VideoWriter(tmp_path / "clip.mp4", fps=10) as writer:
        for index in range(6):
            writer.write(Image.new("RGB", (64, 48), (40 * index, 0, 0)))
    tool("train", *tiny)
    common = ("predict", "checkpoint=outputs/debug_cpu/best.pt", "source=clip.mp4", "threshold=0")
    assert "detections of at least 0 on 3 images" in tool(*common, "video_fps=5", "output_dir=found")
    rows = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert {(row["frame"], row["time_s"]) for row in rows} == {(0, 0.0), (2, 0.2), (4, 0.4)}
    info = video_info(tmp_path / "found" / "clip.mp4")
    assert (info.fps, info.num_frames) == (5.0, 3)
    assert "video_fps must be above 0" in refused(*common, "video_fps=0", "name=none")
    assert "which the drawn images could overwrite" in refused(*common, "output_dir=.")


def test_a_dataset_on_disk(tool: Tool, tmp_path: Path):
    for split in ("train", "val"):
        SyntheticDataset(split, flip_and_resize(None), num_images=4, size=64).write_coco(tmp_path / "coco")
    tool("train", *COCO_RUN, "data.label_map=category_id")
    checkpoint = load_checkpoint("outputs/own/last.pt")
    assert checkpoint.class_table.category_ids == (0, 1, 2, 3, 4, 5, 6)
    assert checkpoint.class_table.names[0] == ""
    (tmp_path / "coco").rename(tmp_path / "moved")
    tool("evaluate", "checkpoint=outputs/own/last.pt", "data.root=moved", "data.val_batch_size=1")
    # another kind of data keeps the resizing of the checkpoint; a key it does not have is refused
    tool(
        "evaluate",
        "checkpoint=outputs/own/last.pt",
        "data=coco",
        "data.root=moved",
        "data.num_workers=0",
        "name=chosen",
    )
    # its detections, scored as a file, give the same numbers
    annotations = "data.val.annotations=moved/annotations/instances_val.json"
    folder = "outputs/evaluate_own_last_moved"
    tool("evaluate", f"detections={folder}/detections.json", annotations, "output_dir=again")
    first, again = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in (folder, "again"))
    assert first == again


def test_keys_of_another_kind_of_data(tool: Tool, tiny: tuple[str, ...], refused: Tool):
    tool("train", *tiny)
    message = refused("evaluate", "checkpoint=outputs/debug_cpu/last.pt", "data.root=elsewhere")
    assert "data.num_val_images" in message
    assert "data=NAME" in message


def test_more_workers_than_cores_are_said_once(tool: Tool, tiny: tuple[str, ...]):
    """In our words; PyTorch would say it for every loader and every iterator."""
    num_cores = len(os.sched_getaffinity(0))
    many = f"data.num_workers={num_cores + 1}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [tool("train", *tiny, many), tool("evaluate", "checkpoint=outputs/debug_cpu/best.pt", many)]
    assert [out.count(f"{many} is more data workers than the {num_cores} CPU cores") for out in runs] == [1, 1]
    assert all(f"Set data.num_workers={num_cores}, " in out for out in runs)
    assert not [str(warning.message) for warning in caught if "worker" in str(warning.message)]
    assert "more data workers" not in tool("train", *tiny, "data.num_workers=0", "name=alone")


def test_what_cannot_be_measured_is_a_dash_on_the_screen(tool: Tool, tiny: tuple[str, ...], tmp_path: Path):
    out = tool("train", *tiny) + tool("evaluate", "checkpoint=outputs/debug_cpu/best.pt")
    assert json.loads((tmp_path / "outputs/debug_cpu/metrics.json").read_text())["APl"] == -1
    assert "val/APl - |" in out
    assert "-1.0" not in out


def test_a_run_goes_on_and_ends(tool: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny, "trainer.ema_decay=0.9")
    last = tmp_path / "outputs" / "debug_cpu" / "last.pt"
    assert load_checkpoint(last).epoch == 1
    # the same command does nothing more; more epochs go on from a path
    assert "already has its 1 epochs" in tool("train", *tiny, "trainer.ema_decay=0.9")
    out = tool("train", *tiny, "trainer.ema_decay=0.9", f"resume={last}", "schedule.epochs=2", "trainer.log_every=1")
    # the first epoch has shown what an evaluation takes
    assert " left\n" in out
    assert "of training left" not in out
    checkpoint = load_checkpoint(last)
    assert checkpoint.epoch == 2
    assert checkpoint.config["schedule"]["epochs"] == 2
    assert checkpoint.ema is not None


def test_a_run_that_goes_on_with_other_batches_counts_to_its_own_end(tool: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny, "data.batch_size=2")
    last = tmp_path / "outputs" / "debug_cpu" / "last.pt"
    out = tool(
        *("train", *tiny, "data.batch_size=2", "trainer.accumulate=2", "trainer.log_every=1"),
        *(f"resume={last}", "schedule.epochs=3"),
    )
    # four steps were made, and two epochs of two are left: by the schedule alone it would be 8/6
    assert load_checkpoint(last).global_step == 8
    assert "step 5/8 |" in out
    assert "step 8/8 |" in out
    assert "images an optimizer step 4 instead of 2, steps an epoch 2 instead of 4" in out


def test_two_ranks_train_and_evaluate(tiny: tuple[str, ...], tmp_path: Path, repository: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # from another folder than the repository
    finished = subprocess.run(
        [*command, str(repository / "tools" / "train.py"), *tiny, "data.batch_size=2", "logger=tensorboard"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    # rank 0 alone speaks
    assert finished.stdout.count("outputs/debug_cpu: epoch") == 1
    assert finished.stdout.count("for 4 images a step") == 1
    checkpoint = load_checkpoint(tmp_path / "outputs" / "debug_cpu" / "last.pt")
    assert (checkpoint.epoch, len(checkpoint.random_states)) == (1, 2)
    assert checkpoint.metrics["AP"] >= 0
    # pictures of every validation image, those that rank 1 evaluated too
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    [events] = (tmp_path / "outputs" / "debug_cpu" / "tensorboard").iterdir()
    tags = event_accumulator.EventAccumulator(str(events)).Reload().Tags()
    assert len(tags["images"]) == 4
    assert {"val/classes/text_summary", "summary/text_summary"} <= set(tags["tensors"])
    assert "val/AP" in tags["scalars"]


def test_init_from_resets_the_head_for_other_classes(tool: Tool, tiny: tuple[str, ...], refused: Tool):
    tool("train", *tiny)
    start = ["init_from=outputs/debug_cpu/last.pt", "data.num_classes=3", "name=fine"]
    out = tool("train", *tiny, *start)
    assert "of the class head start anew" in out
    assert "heads.class_embed.0.bias: (6,) -> (3,)" in out
    message = refused("train", *tiny, *start, "reset_head=false", "name=strict")
    assert "reset_head=auto" in message


def test_the_kernel_is_chosen_when_a_checkpoint_is_used(tool: Tool, tiny: tuple[str, ...], refused: Tool):
    tool("train", *tiny)
    assert "backend=reference" in tool("evaluate", "checkpoint=outputs/debug_cpu/last.pt", "kernel=reference")
    message = refused("evaluate", "checkpoint=outputs/debug_cpu/last.pt", "kernel=cuda", "name=cuda")
    assert "cuda" in message


def test_evaluation_records_the_data_it_used_and_refuses_what_it_would_ignore(
    tool: Tool, tiny: tuple[str, ...], refused: Tool, tmp_path: Path
):
    tool("train", *tiny)
    checkpoint = "checkpoint=outputs/debug_cpu/last.pt"
    message = refused("evaluate", checkpoint, "transforms.eval.size=400", "name=ignored")
    assert "data.eval_transforms.size=N" in message
    assert not (tmp_path / "outputs" / "ignored").exists()
    for _ in range(2):  # the same evaluation may be repeated
        tool("evaluate", checkpoint, "data.batch_size=3", "name=recorded")
    recorded = (tmp_path / "outputs" / "recorded" / "config.yaml").read_text()
    assert "  batch_size: 3" in recorded
    assert "detr.data.synthetic_data" in recorded


def test_a_start_from_weights_says_so_when_it_goes_on_instead(tool: Tool, tiny: tuple[str, ...]):
    tool("train", *tiny)
    out = tool("train", *tiny, "init_from=elsewhere.pt")
    assert "init_from=elsewhere.pt is not used: the run goes on from outputs/debug_cpu/last.pt" in out


def test_a_checkpoint_cannot_choose_what_runs(tool: Tool, tiny: tuple[str, ...], refused: Tool, tmp_path: Path):
    from dataclasses import replace

    tool("train", *tiny)
    checkpoint = load_checkpoint(tmp_path / "outputs" / "debug_cpu" / "last.pt")
    config = json.loads(json.dumps(checkpoint.config))
    config["model"]["backbone"]["timm_args"] = {"x": {"_target_": "os.system", "command": "touch harm"}}
    save_checkpoint(replace(checkpoint, config=config), tmp_path / "bad.pt")
    assert "would run os.system" in refused("evaluate", "checkpoint=bad.pt")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("backend", ["pycocotools", "faster_coco_eval"])
def test_published_detections(tool: Tool, shared_dir: Path, tmp_path: Path, backend: str):
    folder = shared_dir / "data" / "cocoapi-eval"
    pair = json.loads((folder / "expected.json").read_text())["pairs"]["val2014_100/bbox"]
    tool(
        "evaluate",
        f"detections={folder / pair['dt']}",
        f"data.val.annotations={folder / pair['gt']}",
        f"evaluator.backend={backend}",
        "name=scores",
    )
    metrics = json.loads((tmp_path / "outputs" / "scores" / "metrics.json").read_text())
    for name, value in pair["pycocotools"].items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_other_libraries_are_quiet_and_this_one_is_not(tool: Tool, tiny: tuple[str, ...], capfd: Any):
    tool("train", *tiny)
    capfd.readouterr()
    for name, is_heard in (("onnxscript.optimizer", False), ("detr.engine.trainer", True), ("ops.msda", True)):
        logging.getLogger(name).info("a line of %s", name)
        assert (f"a line of {name}" in capfd.readouterr().out) == is_heard
    logging.getLogger("onnxscript").warning("this matters")
    assert "this matters" in capfd.readouterr().out
