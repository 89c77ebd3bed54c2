"""A checkpoint back into a training run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from detr.distributed import DistributedContext, require_same
from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.pace import pace_change
from detr.engine.random_state import restore_random_state
from detr.engine.run_folder import config_differences
from detr.engine.state import TrainState
from detr.engine.weights import load_weights
from detr.structures import ClassTable

_logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: Epochs finished.
        global_step: Optimizer steps made.
        metrics: Of these weights, by name; empty where they were not evaluated.
        best: Of the best evaluation: {"epoch", "AP"}; empty before the first.
        epoch_samples: Images of the epoch under way that all ranks together have trained on.
        train_s: Seconds of training so far, evaluations left out.
    """

    epoch: int = 0
    global_step: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    epoch_samples: int = 0
    train_s: float = 0.0


def resume(
    state: TrainState,
    path: Path,
    *,
    class_table: ClassTable,
    context: DistributedContext,
    config: Mapping[str, Any] | None = None,
    data: Mapping[str, str] | None = None,
) -> Progress:
    """Go on from a checkpoint, exactly as if the run had not stopped, if the ranks are as many.

    Where this run is configured otherwise than the saved one, its own settings count, and what differs is said.
    With other ranks each image of the epoch is still seen once, unless batches are grouped by shape.

    Args:
        state: Freshly built; receives what the checkpoint holds, and the process its random streams.
        path: The checkpoint.
        class_table: Of the dataset.
        context: Ranks and device.
        config: Of this run, to be compared with the saved one.
        data: Fingerprints of this run's dataset, likewise.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or of other classes, another model or another optimizer; or ranks have read different
            files.
    """
    if context.rank > 0 and not path.is_file():
        raise FileNotFoundError(
            f"rank {context.rank} does not see {path.absolute()}, from which rank 0 goes on; ranks on several machines "
            "need output_dir on a file system that all of them share"
        )
    checkpoint = load_checkpoint(path)
    # weights that differ between ranks from here on would never be noticed
    require_same(
        {
            "the step": checkpoint.global_step,
            "images of the epoch": checkpoint.epoch_samples,
            "seconds trained": checkpoint.train_s,
        },
        advice=f"{path} is being replaced, or machines see it late over their file system. Give the command again, and "
        "with resume=PATH a checkpoint that no run is writing",
    )
    _require_same_classes(checkpoint.class_table, class_table, path)
    restore(state, checkpoint, source=str(path))
    num_saved_ranks = len(checkpoint.random_states)
    if num_saved_ranks == context.world_size:
        restore_random_state(checkpoint.random_states[context.rank], state.device)
    if context.rank == 0:
        _say_what_changes(state, checkpoint, context, config)
        _say_if_data_changed(checkpoint.data, data or {})
    return Progress(
        checkpoint.epoch,
        checkpoint.global_step,
        checkpoint.metrics,
        checkpoint.best,
        checkpoint.epoch_samples,
        checkpoint.train_s,
    )


def _say_what_changes(
    state: TrainState, checkpoint: Checkpoint, context: DistributedContext, config: Mapping[str, Any] | None
) -> None:
    """Say where the run goes on, and what an unbroken one would have done otherwise."""
    within = (
        f", {checkpoint.epoch_samples} images into epoch {checkpoint.epoch + 1}" if checkpoint.epoch_samples else ""
    )
    _logger.info("resuming after step %d (%d epochs done%s)", checkpoint.global_step, checkpoint.epoch, within)
    differences = [] if config is None else config_differences(checkpoint.config, config)
    if differences:
        _logger.warning("the settings have changed, and the new ones count:\n  %s", "\n  ".join(differences))
    change = pace_change(
        checkpoint,
        config or {},
        num_ranks=context.world_size,
        steps_per_epoch=state.schedule.steps_per_epoch,
        lr=state.optimizer.param_groups[0]["lr"],
    )
    if change is not None:
        _logger.warning(change)


def _say_if_data_changed(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    changed = [
        f"{split}: {saved[split]} -> {own[split]}" for split in saved if own.get(split, saved[split]) != saved[split]
    ]
    if changed:
        _logger.warning(
            "the dataset is not the one that the run was trained on:\n  %s\nThe run goes on with it, in another order: "
            "of the epoch under way some images come twice and others not. An AP of before is of the other one, "
            "and so is the choice of best.pt. If that is not meant, put the dataset back, or start with another name=",
            "\n  ".join(changed),
        )


def restore(state: TrainState, checkpoint: Checkpoint, *, source: str) -> None:
    """Put weights, optimizer, schedule, scaler and average where they were.

    Rates, decay and all other options of the optimizer are those of this run's configuration, not the saved
    ones: what the configuration says is what happens.

    Args:
        source: Where the checkpoint comes from, for messages.

    Raises:
        ValueError: The model or the parameter groups are others.
    """
    load_weights(state.detector, checkpoint.model, reset_head=False, source=source)
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in state.optimizer.param_groups
    ]
    saved_sizes = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
    sizes = [len(group["params"]) for group in state.optimizer.param_groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"{source}: its optimizer trained {saved_sizes} tensors by group, this run trains {sizes}; freeze the "
            "same parts of the backbone, or use init_from to start a new run from its weights"
        )
    state.optimizer.load_state_dict(checkpoint.optimizer)
    for group, own in zip(state.optimizer.param_groups, options, strict=True):
        group.update(own)
    _lay_out_like_parameters(state.optimizer)
    state.schedule.load_state_dict(checkpoint.schedule)
    if checkpoint.scaler:
        state.scaler.load_state_dict(checkpoint.scaler)
    if state.ema is not None:
        if checkpoint.ema is None:
            _logger.warning("%s holds no averaged weights; the average starts from its plain ones", source)
            state.ema.module.load_state_dict(checkpoint.model)
        else:
            state.ema.load_state_dict(checkpoint.ema)


def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give what the optimizer keeps of each parameter the place and the memory format that its step expects.

    PyTorch leaves both as they were saved, and a fused step goes through the memory of a parameter and of its moments
    side by side: where the formats differ it refuses (CUDA) or takes the moments of other elements (CPU).
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            for name, value in kept.items():
                if name == "step" and isinstance(value, Tensor):
                    kept[name] = value.to(parameter.device if on_device else "cpu")
                elif isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _require_same_classes(saved: ClassTable, own: ClassTable, path: Path) -> None:
    """Refuse to resume a checkpoint whose labels mean something else than the dataset's.

    Raises:
        ValueError: The class tables differ; names what differs.
    """
    if saved == own:
        return
    saved_rows = set(zip(saved.category_ids, saved.names, strict=True))
    own_rows = set(zip(own.category_ids, own.names, strict=True))
    raise ValueError(
        f"{path} was trained on {saved.num_classes} classes, the dataset has {own.num_classes}. Only in the "
        f"checkpoint: {sorted(saved_rows - own_rows)[:5]}; only in the dataset: "
        f"{sorted(own_rows - saved_rows)[:5]}. Use init_from to start a new run from its weights"
    )
