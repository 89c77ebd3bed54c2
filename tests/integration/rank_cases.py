"""Run by test_ranks: evaluations and runs on one, two and four gloo ranks, their results as JSON on stdout."""

import functools
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from killed_runs import first_difference, run_ranks, train
from torch import Tensor, nn

import detr.engine.trainer as trainer
from detr.data import DetectionLoader, EvalTransform, SyntheticDataset
from detr.data.loader import build_train_loader, build_val_loader
from detr.distributed import cleanup, init_distributed
from detr.engine.checkpoint import load_checkpoint
from detr.engine.evaluate import evaluate
from detr.engine.precision import Precision
from detr.engine.preemption import Preempted
from detr.evaluation import CocoEvaluator, PostProcess
from detr.models import Backbone, deformable_detr
from detr.structures import DetectorOutput, ImageBatch
from detr.telemetry.loggers import CompositeLogger

SIZE = 64
NUM_CLASSES = 3


class NearlyRight(nn.Module):
    """The true boxes, moved a little, with the classes and scores of a real network with random weights.

    Scores so carry the rounding of whatever batch an image is in, and AP is far from 0 and 1.
    """

    def __init__(self, dataset: SyntheticDataset) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = deformable_detr(
            Backbone("test_resnet", freeze_norm=True), num_classes=NUM_CLASSES, num_queries=12, num_levels=2, d_model=32
        )
        self._targets = [dataset[index] for index in range(len(dataset))]

    def forward(self, images: ImageBatch) -> DetectorOutput:
        output: DetectorOutput = self.network(images)
        logits, boxes = output.layer_logits.clone(), output.layer_boxes.clone()
        for row, pixels in enumerate(images.pixels):
            for image, target in self._targets:
                if torch.equal(pixels[:, : image.shape[1], : image.shape[2]], image):
                    generator = torch.Generator().manual_seed(target.image_id)
                    noise = 0.03 * torch.randn(target.boxes.shape, generator=generator)
                    count = min(len(target.boxes), boxes.shape[2])
                    boxes[-1, row, :count] = (target.boxes + noise)[:count].clamp(0.01, 0.99)
                    logits[-1, row, torch.arange(count), target.labels[:count]] += 1.0
        return DetectorOutput(logits, boxes)


def score(num_images: int, batch_size: int, pad_to: int, output_dir: Path) -> None:
    """Evaluate on this rank's share; every rank writes the numbers it got."""
    torch.set_num_threads(1)
    context = init_distributed("cpu")
    dataset = SyntheticDataset(
        "val", EvalTransform(None, None), num_images=num_images, size=SIZE, num_classes=NUM_CLASSES, seed=0
    )
    shard = {"rank": context.rank, "world_size": context.world_size}
    loader: DetectionLoader = build_val_loader(dataset, batch_size=batch_size, num_workers=0, pad_to=pad_to, **shard)
    metrics = evaluate(
        NearlyRight(dataset).eval(),
        loader,
        CocoEvaluator(dataset.coco_ground_truth(), dataset.class_table),
        PostProcess(),
        precision=Precision("fp32"),
        device=context.device,
    )
    (output_dir / f"{context.rank}_of_{context.world_size}.json").write_text(json.dumps(metrics.to_dict()))
    cleanup()


def evaluations(folder: Path) -> dict[str, Any]:
    """The numbers by case and number of ranks; of all ranks, which must agree."""
    report: dict[str, Any] = {}
    for name, (num_images, batch_size, pad_to, world_sizes) in {
        "21 images, batch 1": (21, 1, 1, (1, 2)),
        "21 images, batch 4, fixed pad_to": (21, 4, SIZE, (1, 2)),
        "3 images on 4 ranks": (3, 2, SIZE, (1, 4)),
    }.items():
        report[name] = {}
        for world_size in world_sizes:
            output_dir = folder / f"{name}_{world_size}"
            output_dir.mkdir()
            assert run_ranks(world_size, score, num_images, batch_size, pad_to, output_dir), name
            report[name][str(world_size)] = [json.loads(path.read_text()) for path in sorted(output_dir.iterdir())]
    return report


def too_few_to_train(output_dir: Path) -> None:
    """Three images cannot fill a step of four ranks: each rank says so."""
    context = init_distributed("cpu")
    dataset = SyntheticDataset("train", EvalTransform(None, None), num_images=3, size=SIZE)
    try:
        build_train_loader(
            dataset, batch_size=1, num_workers=0, pad_to=1, seed=0, rank=context.rank, world_size=context.world_size
        )
    except ValueError as error:
        (output_dir / f"{context.rank}.txt").write_text(str(error))
    cleanup()


class SignalAt:
    """Sends this process SIGTERM after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._step:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def close(self) -> None:
        pass


def train_until_signalled(path: Path, asked_rank: int | None) -> None:
    """A run in which one rank alone is asked to stop, soon after its fourth step; saves nothing before."""

    def ask(run: trainer.Trainer) -> None:
        if asked_rank == run.context.rank:
            run.logger = CompositeLogger([run.logger, SignalAt(4)])

    try:
        train(path, 1000, None, ask)
    except Preempted as stop:
        (path / f"stopped_{os.environ['RANK']}.txt").write_text(str(stop))
        cleanup()


def preemption(folder: Path) -> dict[str, Any]:
    """One of two ranks is asked to stop: where both do, and how the run ends after it goes on."""
    whole, path = folder / "whole", folder / "stopped"
    assert run_ranks(2, train_and_keep_buffers, whole)
    assert run_ranks(2, train_until_signalled, path, 1)
    stopped = load_checkpoint(path / "last.pt")
    messages = [file.read_text() for file in sorted(path.glob("stopped_*.txt"))]
    assert run_ranks(2, train_until_signalled, path, None)
    ends = [load_checkpoint(run / "last.pt") for run in (whole, path)]
    fields = ("model", "ema", "optimizer", "schedule", "random_states", "global_step")
    differences = [first_difference(*(getattr(end, field) for end in ends), field) for field in fields]
    return {"step": stopped.global_step, "messages": messages, "differences": [d for d in differences if d]}


def train_and_keep_buffers(path: Path) -> None:
    """Each rank leaves the batch statistics that its evaluation used."""
    rank = int(os.environ["RANK"])
    run_evaluation = trainer.evaluate

    def evaluate_and_keep(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        statistics: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch.save(statistics, path / f"statistics_{rank}.pt")
        return run_evaluation(model, *arguments, **options)

    trainer.evaluate = evaluate_and_keep
    train(path, 1000, None)


def batch_statistics(folder: Path) -> dict[str, Any]:
    """Where the statistics that the whole run's ranks evaluated with differ, from each other and the checkpoint."""
    path = folder / "whole"
    used = [torch.load(path / f"statistics_{rank}.pt", weights_only=True) for rank in range(2)]
    weights = load_checkpoint(path / "last.pt").weights
    saved = {name: buffer for name, buffer in used[0].items() if name in weights}
    return {
        "between ranks": first_difference(used[0], used[1], "statistics"),
        "to the checkpoint": first_difference(saved, {name: weights[name] for name in saved}, "statistics"),
        "names": [name for name in saved if "running_var" in name],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = folder / "few"
        few.mkdir()
        report = {
            "evaluations": evaluations(folder),
            "preemption": preemption(folder),
            "batch statistics": batch_statistics(folder),
            "few": run_ranks(4, functools.partial(too_few_to_train, few)) and [p.read_text() for p in few.iterdir()],
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
