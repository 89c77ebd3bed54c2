"""Run by test_exchanged_ranks, plainly and under torchrun: whole runs, and halves that others go on from.

A step takes four images: one rank accumulates four batches of one, two ranks accumulate two.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from detr.data import EvalTransform, flip_and_resize, synthetic_data
from detr.distributed import DistributedContext, cleanup, init_distributed, is_main
from detr.engine.interval import steps_per_epoch
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.restore import Progress, resume
from detr.engine.run_checkpoint import RunDescription
from detr.engine.run_folder import open_run_folder, start_run_folder
from detr.engine.schedule import StepDecay
from detr.engine.settings import TrainerSettings
from detr.engine.state import build_train_state
from detr.engine.trainer import Trainer
from detr.evaluation import CocoEvaluator, PostProcess
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, DeformableDETR, deformable_detr
from detr.models.frozen_norm import FrozenBatchNorm
from detr.telemetry.loggers import CompositeLogger, JsonlLogger

IMAGES_A_STEP = 4
NUM_CLASSES = 3


class Stopped(Exception):
    """Stands for a kill of all ranks."""


class StopAfter:
    """A logger that ends a run once `step` is saved: while the next one is logged."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.step is not None and step > self.step:
            raise Stopped

    def close(self) -> None:
        pass


def build_model() -> DeformableDETR:
    """In float64, without dropout and batch statistics."""
    torch.manual_seed(0)
    backbone = Backbone("test_resnet", freeze_norm=True, freeze=["conv1"])
    for module in backbone.modules():
        if isinstance(module, FrozenBatchNorm):
            # timm starts the last norm of a block at 0, where a frozen one would keep the block from training
            module.weight.fill_(1)
    return deformable_detr(
        backbone,
        num_classes=NUM_CLASSES,
        num_queries=8,
        num_levels=2,
        d_model=32,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=32,
        dropout=0.0,
        with_box_refine=True,
    ).double()


def run(output_dir: Path, context: DistributedContext, *, start: str = "never", stop_after: int | None = None) -> None:
    """Two epochs of three steps with a cut of the rate between them, or to where it is stopped."""
    settings = TrainerSettings(
        accumulate=IMAGES_A_STEP // context.world_size,
        log_every=1,
        eval_every=2,
        save_every_steps=1,
        ema_decay=0.9,
        num_pictures=0,
    )
    data = synthetic_data(
        size=64,
        num_classes=NUM_CLASSES,
        num_train_images=12,
        num_val_images=2,
        seed=0,
        batch_size=1,
        val_batch_size=None,
        num_workers=0,
        pad_to=1,
        train_transforms=flip_and_resize(None),
        eval_transforms=EvalTransform(None, None),
    )
    config = {"trainer": {"accumulate": settings.accumulate}, "data": {"batch_size": 1}}
    folder = open_run_folder(output_dir, config, resume=start)
    shard = {"rank": context.rank, "world_size": context.world_size}
    loader = data.train_loader(seed=5, **shard)
    state = build_train_state(
        build_model(),
        SetCriterion(num_classes=NUM_CLASSES, matcher=HungarianMatcher()),
        build_adamw,
        StepDecay(epochs=2, milestones=(1,)),
        Precision("fp32"),
        context,
        total_batch=IMAGES_A_STEP,
        steps_per_epoch=steps_per_epoch(loader, settings.accumulate),
        ema_decay=settings.ema_decay,
        # a gradient of another length, clipped, would be the same
        max_grad_norm=None,
    )
    progress = Progress()
    if folder.resume_from is not None:
        progress = resume(state, folder.resume_from, class_table=data.class_table, context=context, config=config)
    if is_main():
        start_run_folder(folder, config)
    record = [JsonlLogger(folder.metrics_log)] if is_main() else []
    trainer = Trainer(
        state,
        loader,
        data.val_loader(**shard),
        CocoEvaluator(data.val_ground_truth(), data.class_table),
        PostProcess(),
        settings=settings,
        folder=folder,
        description=RunDescription(data.class_table, data.preprocessing, config),
        context=context,
        progress=progress,
        logger=CompositeLogger([*record, StopAfter(stop_after)]),
    )
    try:
        trainer.fit()
    except Stopped:
        assert stop_after is not None


def main(output_dir: Path, parts: list[str]) -> None:
    """Each part is NAME, NAME:STEP to stop after a step, or NAME<OTHER to go on from another's last.pt."""
    torch.set_num_threads(1)
    context = init_distributed("cpu")
    for part in parts:
        name, _, other = part.partition("<")
        name, _, step = name.partition(":")
        start = str(output_dir / other / "last.pt") if other else "never"
        run(output_dir / name, context, start=start, stop_after=int(step) if step else None)
    cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
