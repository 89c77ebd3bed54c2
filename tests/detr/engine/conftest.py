"""A detector small enough to train in a test, its batches, and all a trainer needs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.data import DetectionData, EvalTransform, flip_and_resize, synthetic_data
from detr.distributed import DistributedContext
from detr.engine.checkpoint import Checkpoint
from detr.engine.interval import steps_per_epoch
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.random_state import random_state
from detr.engine.restore import Progress, resume
from detr.engine.run_checkpoint import RunDescription
from detr.engine.run_folder import open_run_folder, start_run_folder
from detr.engine.schedule import LRCurve, StepDecay
from detr.engine.settings import TrainerSettings
from detr.engine.state import TrainState, build_train_state
from detr.engine.trainer import Trainer
from detr.evaluation import CocoEvaluator, PostProcess
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, DeformableDETR, deformable_detr
from detr.models.frozen_norm import FrozenBatchNorm
from detr.models.two_stage import ProposalScore
from detr.structures import Batch, ClassTable, ImageBatch, Target
from detr.telemetry.loggers import JsonlLogger, Logger

NUM_CLASSES = 3
ONE_RANK = DistributedContext(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def make_detector(
    *,
    num_classes: int = NUM_CLASSES,
    dropout: float = 0.0,
    seed: int = 0,
    two_stage: bool = False,
    proposal_score: ProposalScore = "binary",
) -> DeformableDETR:
    """A detector without batch statistics, so that batches can be split without changing the result."""
    torch.manual_seed(seed)
    backbone = Backbone("test_resnet", freeze_norm=True, freeze=["conv1"])
    for module in backbone.modules():
        if isinstance(module, FrozenBatchNorm):
            # timm starts the last norm of a block at 0, where a frozen one would keep the block from training
            module.weight.fill_(1)
    return deformable_detr(
        backbone,
        num_classes=num_classes,
        num_queries=8,
        num_levels=2,
        d_model=32,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=32,
        dropout=dropout,
        with_box_refine=True,
        two_stage=two_stage,
        proposal_score=proposal_score,
    )


def make_batches(boxes: Sequence[Sequence[int]], *, size: int = 64) -> list[Batch]:
    """Batches of square images; `boxes` holds the number of boxes of each image."""
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            ImageBatch.from_images(
                [torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=generator) for _ in counts]
            ),
            tuple(
                Target(
                    labels=torch.randint(0, NUM_CLASSES, (count,), generator=generator),
                    boxes=torch.rand(count, 4, generator=generator) * 0.4 + 0.2,
                    image_id=index,
                    orig_size=(size, size),
                )
                for index, count in enumerate(counts)
            ),
        )
        for counts in boxes
    ]


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch of all images of `batches`, which have one size."""
    images = [image for batch in batches for image in batch.images.pixels]
    return Batch(ImageBatch.from_images(images), tuple(target for batch in batches for target in batch.targets))


def make_state(
    model: DeformableDETR | None = None,
    *,
    context: DistributedContext = ONE_RANK,
    curve: LRCurve | None = None,
    total_batch: int = 4,
    steps: int = 2,
    fused: bool = True,
    ema_decay: float | None = None,
    max_grad_norm: float | None = 0.1,
    lr: float = 1e-3,
    retry_oom: bool = False,
    cuda_graphs: bool = False,
) -> TrainState:
    model = make_detector() if model is None else model
    return build_train_state(
        model,
        SetCriterion(num_classes=NUM_CLASSES, matcher=HungarianMatcher()),
        lambda trained, *, total_batch: build_adamw(
            trained, total_batch=total_batch, lr=lr, scale_lr=False, fused=fused
        ),
        curve or StepDecay(epochs=4, milestones=(2,)),
        Precision("fp32"),
        context,
        total_batch=total_batch,
        steps_per_epoch=steps,
        ema_decay=ema_decay,
        max_grad_norm=max_grad_norm,
        retry_oom=retry_oom,
        cuda_graphs=cuda_graphs,
    )


def make_data(*, batch_size: int = 2, num_train_images: int = 8) -> DetectionData:
    return synthetic_data(
        size=64,
        num_classes=NUM_CLASSES,
        num_train_images=num_train_images,
        num_val_images=4,
        seed=0,
        batch_size=batch_size,
        val_batch_size=None,
        num_workers=0,
        pad_to=1,
        train_transforms=flip_and_resize(None),
        eval_transforms=EvalTransform(None, None),
    )


def make_trainer(
    output_dir: Path,
    *,
    epochs: int = 4,
    resume_choice: str = "auto",
    logger: Logger | None = None,
    data: DetectionData | None = None,
    ema_decay: float | None = 0.9,
    dropout: float = 0.1,
    **settings: Any,
) -> Trainer:
    """A run as tools/train puts it together, on tiny synthetic data, with a rate cut after two epochs."""
    data = data or make_data()
    config = {"name": output_dir.name, "schedule": {"epochs": epochs}, "dropout": dropout}
    folder = open_run_folder(output_dir, config, resume=resume_choice)
    options = TrainerSettings(accumulate=2, log_every=1, ema_decay=ema_decay, **settings)
    loader = data.train_loader(seed=5)
    state = make_state(
        make_detector(dropout=dropout),
        curve=StepDecay(epochs=epochs, milestones=(2,)),
        steps=steps_per_epoch(loader, options.accumulate),
        ema_decay=options.ema_decay,
    )
    torch.manual_seed(7)
    progress = Progress()
    if folder.resume_from is not None:
        progress = resume(
            state, folder.resume_from, class_table=data.class_table, context=ONE_RANK, data=data.fingerprints()
        )
    start_run_folder(folder, config)
    return Trainer(
        state,
        loader,
        data.val_loader(),
        CocoEvaluator(data.val_ground_truth(), data.class_table),
        PostProcess(),
        settings=options,
        folder=folder,
        description=RunDescription(data.class_table, data.preprocessing, config, data.fingerprints()),
        context=ONE_RANK,
        progress=progress,
        logger=logger or JsonlLogger(folder.metrics_log),
    )


def compare_bits(first: Any, second: Any, path: str = "") -> None:
    """Bit for bit, through nested containers."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            compare_bits(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for index, pair in enumerate(zip(first, second, strict=True)):
            compare_bits(*pair, f"{path}[{index}]")
    else:
        assert first == second, path


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The tests are too small for more, and sums in a fixed order are what they compare."""
    torch.set_num_threads(1)


@pytest.fixture
def plots() -> None:
    """Asks for the pictures of a run, which cost a second an evaluation."""


@pytest.fixture(autouse=True)
def _no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("detr.engine.trainer.plot_curves", lambda metrics_log, folder: None)


@pytest.fixture(scope="session")
def detector() -> Callable[..., DeformableDETR]:
    return make_detector


@pytest.fixture(scope="session")
def batches() -> Callable[..., list[Batch]]:
    return make_batches


@pytest.fixture(scope="session")
def merged() -> Callable[..., Batch]:
    return merge


@pytest.fixture(scope="session")
def train_state() -> Callable[..., TrainState]:
    return make_state


@pytest.fixture(scope="session")
def data() -> Callable[..., DetectionData]:
    return make_data


@pytest.fixture(scope="session")
def trainer() -> Callable[..., Trainer]:
    return make_trainer


@pytest.fixture
def checkpoint() -> Checkpoint:
    """A small one, after step 12 and epoch 3."""
    return Checkpoint(
        epoch=3,
        global_step=12,
        model={"weight": torch.arange(3.0)},
        optimizer={"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]},
        schedule={"num_steps": 12, "steps_per_epoch": 4},
        scaler={},
        ema=None,
        random_states=[random_state(torch.device("cpu"))],
        class_table=ClassTable(("cat", "犬"), (7, 90)),
        preprocessing={"resize": {"size": [64, 64], "max_size": None}},
        config={"seed": 1, "nested": {"list": [1, 2.5, None, True]}},
        metrics={"AP": 0.5, "per_class": {"cat": None}},
        best={"epoch": 2, "AP": 0.5},
    )


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return compare_bits
