"""What all ranks train on at once, and what follows where a run goes on with other ranks or batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detr.engine.checkpoint import Checkpoint
from detr.engine.run_folder import flatten


@dataclass(frozen=True)
class Pace:
    """What a run takes at once; None where its configuration does not say.

    Attributes:
        num_ranks: How many there are.
        forward_images: Images of all ranks a forward pass.
        step_images: Images of all ranks an optimizer step.
        is_grouped: Whether images of a forward pass are of like shape.
        shares_scale: Whether they draw one scale.
    """

    num_ranks: int
    forward_images: int | None
    step_images: int | None
    is_grouped: bool
    shares_scale: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], num_ranks: int) -> "Pace":
        """By the resolved configuration of a run."""
        values = flatten(config)
        batch_size, accumulate = values.get("data.batch_size"), values.get("trainer.accumulate")
        forward_images = None if batch_size is None else batch_size * num_ranks
        return cls(
            num_ranks,
            forward_images,
            None if forward_images is None or accumulate is None else forward_images * accumulate,
            bool(values.get("data.sampling.group_by_aspect")),
            bool(values.get("data.sampling.one_scale_a_batch")),
        )


def pace_change(
    checkpoint: Checkpoint, config: Mapping[str, Any], *, num_ranks: int, steps_per_epoch: int, lr: float
) -> str | None:
    """What to tell a user who goes on with other ranks or batches; None where they are the same.

    Args:
        checkpoint: What the run goes on from.
        config: Of this run, resolved.
        num_ranks: Of this run.
        steps_per_epoch: Optimizer steps.
        lr: Of the main parameter group, where the run goes on.
    """
    saved, own = Pace.of(checkpoint.config, len(checkpoint.random_states)), Pace.of(config, num_ranks)
    pairs = {
        "ranks": (saved.num_ranks, own.num_ranks),
        "images a forward pass": (saved.forward_images, own.forward_images),
        "images an optimizer step": (saved.step_images, own.step_images),
    }
    changes = [
        f"{name} {after} instead of {before}"
        for name, (before, after) in pairs.items()
        if before is not None and after is not None and before != after
    ]
    if not changes:
        return None
    saved_steps, saved_lr = checkpoint.schedule["steps_per_epoch"], checkpoint.optimizer["param_groups"][0]["lr"]
    if steps_per_epoch != saved_steps:
        changes.append(f"steps an epoch {steps_per_epoch} instead of {saved_steps}")
    if f"{lr:.3g}" != f"{saved_lr:.3g}":
        changes.append(
            f"the learning rate {lr:.3g} instead of {saved_lr:.3g} (it follows the images a step unless "
            "optimizer.scale_lr=false)"
        )
    return (
        f"the run goes on with other ranks or batches than it was saved with: {', '.join(changes)}. Dropout draws "
        f"other numbers. {_order(saved, own)}"
    )


def _order(saved: Pace, own: Pace) -> str:
    """What becomes of the epoch under way, whose images are drawn from where it stopped."""
    if saved.forward_images != own.forward_images:
        if saved.is_grouped or own.is_grouped:
            return (
                "data.sampling.group_by_aspect orders an epoch by the images of a forward pass: of the one under way "
                "some images come twice and others not; those after it are whole"
            )
        if saved.shares_scale or own.shares_scale:
            return "Each image of the epoch is still seen once; it shares its scale with other images than before"
    return "Each image of the epoch is still seen once, with the same augmentation"
