"""Run by test_two_ranks, plainly and under torchrun: the gradient of one step, and a short run."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from detr.distributed import DistributedContext, cleanup, init_distributed, is_main
from detr.engine.checkpoint import Checkpoint, save_checkpoint
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.restore import resume
from detr.engine.same_run import require_same_run
from detr.engine.schedule import StepDecay
from detr.engine.state import TrainState, build_train_state, share_weights
from detr.engine.step import train_step
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, DeformableDETR, deformable_detr
from detr.structures import Batch, ClassTable, ImageBatch, Target

TABLE = ClassTable(("a",), (1,))

# boxes of each image; rank 1 of 2 gets the second half of each pair, in the second window nothing but negatives
WINDOWS = [[(3, 1), (0, 4)], [(2, 0), (5, 0)]]


def make_image(index: int, num_boxes: int) -> tuple[torch.Tensor, Target]:
    generator = torch.Generator().manual_seed(index)
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (num_boxes,), generator=generator)
    boxes = torch.rand(num_boxes, 4, generator=generator) * 0.4 + 0.2
    return image, Target(labels, boxes, image_id=index, orig_size=(64, 64))


def make_windows(rank: int, world_size: int) -> list[list[Batch]]:
    """The batches of a rank; one rank gets both images of each pair."""
    windows = []
    for number, window in enumerate(WINDOWS):
        batches = []
        for position, pair in enumerate(window):
            samples = [make_image(10 * number + 2 * position + k, count) for k, count in enumerate(pair)]
            images, targets = zip(*samples[rank::world_size], strict=True)
            batches.append(Batch(ImageBatch.from_images(images), targets))
        windows.append(batches)
    return windows


def build_state(model: DeformableDETR, context: DistributedContext, *, averaged: bool) -> TrainState:
    """Under DDP, or as captured passes train: without a wrapper, gradients averaged after the backward pass."""
    state = build_train_state(
        model,
        SetCriterion(num_classes=3, matcher=HungarianMatcher()),
        build_adamw,
        StepDecay(epochs=1, milestones=()),
        Precision("fp32"),
        replace(context, world_size=1) if averaged else context,
        total_batch=4,
        steps_per_epoch=2,
        ema_decay=0.9,
    )
    if not averaged:
        return state
    for model in (state.detector, state.evaluated):
        share_weights(model)
    return replace(state, averages_gradients=True)


def refusals(state: TrainState, context: DistributedContext, folder: Path) -> dict[str, str]:
    """What is said to ranks that would train other weights than the others, or average them with other ones."""
    rank = context.rank
    other = copy.deepcopy(state.detector)
    if context.rank == 1:
        other.to(memory_format=torch.contiguous_format)
    # no rank has it, so that both get as far as the refusal
    unused = nn.Parameter(torch.zeros(3))
    state.detector.register_parameter("unused", unused)
    state.optimizer.add_param_group({"params": [unused]})
    [window, _] = make_windows(context.rank, context.world_size)
    return {
        "layouts": refusal(lambda: share_weights(other)),
        "no gradient": refusal(lambda: train_step(state, window)),
        "settings": refusal(
            lambda: require_same_run(
                {"name": str(rank), "data": {"root": f"/{rank}"}, "optimizer": {"lr": rank}}, {}, {}
            )
        ),
        "data": refusal(lambda: require_same_run({"model": {"num_queries": rank}}, {"train": f"{rank} images"}, {})),
        "code": refusal(
            lambda: require_same_run({}, {"train": f"{rank} images"}, {"torch": f"2.{rank}", "triton": None})
        ),
        "checkpoint": refusal(lambda: resume_other_files(state, context, folder)),
    }


def resume_other_files(state: TrainState, context: DistributedContext, folder: Path) -> None:
    """As where a run replaces its last.pt between the reads of two ranks."""
    path = folder / f"last_{context.rank}.pt"
    checkpoint = Checkpoint(
        epoch=1,
        global_step=7 + context.rank,
        model=state.detector.state_dict(),
        optimizer=state.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        scaler={},
        ema=None,
        random_states=[],
        class_table=TABLE,
        preprocessing={},
        config={},
        metrics={},
        best={},
    )
    save_checkpoint(checkpoint, path)
    resume(state, path, class_table=TABLE, context=context)


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def main(output_dir: Path) -> None:
    torch.set_num_threads(1)
    context = init_distributed("cpu")
    report = {}
    for kind, dtype in (("", torch.float64), ("", torch.float32), ("averaged ", torch.float64)):
        # each rank starts from other weights: DDP must hand out those of rank 0
        torch.manual_seed(context.rank)
        backbone = Backbone("test_resnet", freeze_norm=True)
        model = deformable_detr(
            backbone,
            num_classes=3,
            num_queries=8,
            num_levels=2,
            d_model=32,
            num_heads=2,
            num_encoder_layers=1,
            num_decoder_layers=2,
            dim_feedforward=32,
            dropout=0.0,
            with_box_refine=True,
        )
        state = build_state(model.to(dtype), context, averaged=bool(kind))
        start = copy.deepcopy(state.detector.state_dict())
        for number, window in enumerate(make_windows(context.rank, context.world_size)):
            # Adam's first step is lr * sign: where a gradient is next to nothing, rounding would decide the weights
            state.detector.load_state_dict(start)
            result = train_step(state, window)
            gradients = {name: p.grad for name, p in state.detector.named_parameters() if p.grad is not None}
            report[f"{kind}{dtype}/{number}"] = {"gradients": gradients, "loss": result.loss, "norm": result.grad_norm}
        report[f"{kind}{dtype}/weights"] = state.detector.state_dict()
        report[f"{kind}{dtype}/ema"] = state.ema.module.state_dict()
        if kind and context.world_size > 1:
            report["refusals"] = refusals(state, context, output_dir)
    torch.save(report, output_dir / f"rank{context.rank}_of_{context.world_size}.pt")
    assert is_main() == (context.rank == 0)
    cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
