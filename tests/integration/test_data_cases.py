"""What people report about the data of detectors, each from the command line. Smaller triggers are in tests/detr/data.

Reported line -> where it is tested beside this file: ids with gaps, of any start or order, as strings; missing keys;
annotation id 0; NaN, negative and outside boxes; missing files (test_annotations, test_coco, test_health); EXIF,
16-bit, gray, CMYK, palette, alpha, truncated files (test_images, test_coco); rows of the head by class name
(engine/test_weights); memory of workers (benchmark/data); too few images (test_loader); ranks without
images in evaluation (evaluation/test_two_ranks); perfect predictions of id 0 (evaluation/test_evaluate_files).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from detr.engine.checkpoint import load_checkpoint

Tool = Callable[..., str]

SMALL = (
    "data=coco",
    "data.root=d",
    "data.num_workers=0",
    "backbone.name=test_resnet",
    "device=cpu",
    "schedule.epochs=1",
    "name=own",
)


def write(root: Path, ids: list[int], *, boxes_in: set[int], num_images: int = 4) -> None:
    """A dataset of gray images; those in `boxes_in` have a box of each class, the others none."""
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        (root / "annotations").mkdir(exist_ok=True)
        annotations: list[dict[str, Any]] = []
        for image in range(num_images):
            Image.new("RGB", (64, 48), "gray").save(root / split / f"{image}.jpg")
            annotations += [
                {
                    "id": 1 + len(annotations) + number,
                    "image_id": image,
                    "category_id": ids[number],
                    "bbox": [5, 5, 20, 20],
                }
                for number in range(len(ids) if image in boxes_in else 0)
            ]
        content = {
            "images": [{"id": i, "file_name": f"{i}.jpg", "width": 64, "height": 48} for i in range(num_images)],
            "categories": [{"id": each, "name": f"class {each}"} for each in ids],
            "annotations": annotations,
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_images_without_objects_train_as_negatives(tool: Tool, tmp_path: Path, batch_size: int):
    """DETR#335, DETR#9: batches that hold no box at all."""
    write(tmp_path / "d", [1], boxes_in={0})
    out = tool("train", *SMALL, f"data.batch_size={batch_size}", "trainer.log_every=1")
    assert "3 images without boxes kept as negatives" in out
    losses = [json.loads(line) for line in (tmp_path / "outputs/own/metrics.jsonl").read_text().splitlines()]
    values = [row["train/loss"] for row in losses if "train/loss" in row]
    assert len(values) == 4 // batch_size
    assert all(0 < value < 1e4 for value in values)


@pytest.mark.parametrize("ids", [list(range(1, 11)), list(range(10)), [3, 90, 7]])
def test_predictions_carry_the_ids_and_names_of_the_file(tool: Tool, tmp_path: Path, ids: list[int]):
    """RF#961, RF#262, RF#330, DDETR#57, DF#10: no id is one off, and none is out of range."""
    write(tmp_path / "d", ids, boxes_in={0, 1, 2, 3})
    tool("train", *SMALL, "data.batch_size=4")
    checkpoint = load_checkpoint(tmp_path / "outputs/own/last.pt")
    assert checkpoint.class_table.category_ids == tuple(sorted(ids))
    assert checkpoint.weights["heads.class_embed.0.weight"].shape[0] == len(ids)
    tool("predict", "checkpoint=outputs/own/last.pt", "source=d/val", "threshold=0", "output_dir=found", "device=cpu")
    rows = json.loads((tmp_path / "found/predictions.json").read_text())
    assert {row["category_id"] for row in rows} <= set(ids)
    assert all(row["category_name"] == f"class {row['category_id']}" for row in rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_truncated_image_is_one_line_that_names_it_and_can_be_skipped(
    tool: Tool, refused: Tool, tmp_path: Path, num_workers: int
):
    """D2#143, SKU110K#23: hours in, from a worker."""
    write(tmp_path / "d", [1], boxes_in={0, 1, 2, 3})
    path = tmp_path / "d/train/2.jpg"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    command = (*SMALL, "data.batch_size=1", f"data.num_workers={num_workers}")
    message = refused("train", *command)
    lines = [line for line in message.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "image 2: cannot read the image d/train/2.jpg" in lines[0]
    assert "worker process" not in message
    out = tool("train", *command, "data.faulty_images=skip", "name=skipping")
    assert "1 of 4 images skipped (1 x image_unreadable)" in out
    assert load_checkpoint(tmp_path / "outputs/skipping/last.pt").global_step == 3


def test_an_unreadable_validation_image_ends_the_run_before_its_first_step(tool: Tool, refused: Tool, tmp_path: Path):
    write(tmp_path / "d", [1], boxes_in={0, 1, 2, 3})
    (tmp_path / "d/val/2.jpg").write_bytes(b"no image")
    message = refused("train", *SMALL, "data.batch_size=1")
    assert "1 of the 4 images of d/annotations/instances_val.json cannot be evaluated on" in message
    assert "image 2: cannot read the image d/val/2.jpg" in message
    assert not list((tmp_path / "outputs").rglob("*.pt"))
    tool("train", *SMALL, "data.batch_size=1", "data.faulty_images=skip")


def test_faulty_entries_can_be_dropped(tool: Tool, refused: Tool, tmp_path: Path):
    """DETR#190, DETR#28, DDETR#185: named before training, or left out."""
    write(tmp_path / "d", [1, 2, 3, 4, 5], boxes_in={0, 1})
    file = tmp_path / "d/annotations/instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][3]["category_id"] = 6
    file.write_text(json.dumps(content))
    assert "annotation 4: category_id 6 is unknown; the categories are [1, 2, 3, 4, 5]" in refused("train", *SMALL)
    out = tool("train", *SMALL, "data.faulty_annotations=drop")
    assert "1 x category_id_unknown" in out
    assert "9 boxes" in out


def test_switches_of_sampling_train_from_the_command_line(tool: Tool, tmp_path: Path):
    write(tmp_path / "d", [1, 2], boxes_in={0, 1})
    switches = (
        "data.sampling.group_by_aspect=true",
        "data.sampling.one_scale_a_batch=true",
        "data.sampling.repeat_threshold=1",
    )
    tool("train", *SMALL, *switches, "data.batch_size=2", f"data.cache_dir={tmp_path}/cache", "transforms=strong",
         "transforms.train.sizes=[48,64]", "transforms.eval.size=48")  # fmt: skip
    # two images of four have boxes of both classes: sqrt(1 / 0.5) = 1.41 times each, and 2 others: 4.83 draws
    assert load_checkpoint(tmp_path / "outputs/own/last.pt").global_step == 2
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 8
    assert torch.load(tmp_path / "outputs/own/last.pt", weights_only=True)
