"""What a training run puts into a checkpoint."""

from dataclasses import dataclass, field
from typing import Any

from detr.engine.checkpoint import Checkpoint
from detr.engine.restore import Progress
from detr.engine.state import TrainState
from detr.structures import ClassTable


@dataclass(frozen=True)
class RunDescription:
    """What a checkpoint says about its run beside its state; see `Checkpoint`."""

    class_table: ClassTable
    preprocessing: dict[str, Any]
    config: dict[str, Any]
    data: dict[str, str] = field(default_factory=dict)


def run_checkpoint(
    state: TrainState,
    progress: Progress,
    description: RunDescription,
    *,
    random_states: list[dict[str, Any]],
    train_s: float,
) -> Checkpoint:
    """The checkpoint of a run where it stands. Its tensors are those of `state`, not copies.

    Args:
        state: What is trained.
        progress: How far it has come.
        description: What else it says.
        random_states: One a rank; see `random_state`.
        train_s: Seconds trained until now, evaluations left out.
    """
    return Checkpoint(
        epoch=progress.epoch,
        global_step=progress.global_step,
        model=state.detector.state_dict(),
        optimizer=state.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        scaler=state.scaler.state_dict(),
        ema=None if state.ema is None else state.ema.state_dict(),
        random_states=random_states,
        class_table=description.class_table,
        preprocessing=description.preprocessing,
        config=description.config,
        metrics=progress.metrics,
        best=progress.best,
        epoch_samples=progress.epoch_samples,
        train_s=train_s,
        data=description.data,
    )
