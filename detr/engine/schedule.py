"""Learning rates over a run: a factor on every group's own rate, a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer


class LRCurve(Protocol):
    """The shape of a schedule."""

    @property
    def epochs(self) -> int: ...

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rates are multiplied with at optimizer step `step`, counted from 0."""
        ...


@dataclass(frozen=True)
class StepDecay:
    """Rates cut at whole epochs, as the original does (recipe section 4).

    Args:
        epochs: Length of the run.
        milestones: After how many epochs the rates are multiplied with `gamma`; (40,) cuts once, before
            the 41st epoch.
        gamma: The cut.
        warmup_steps: Optimizer steps over which the rates rise linearly from zero. 0 starts at the full rate.

    Raises:
        ValueError: A value is out of range.
    """

    epochs: int
    milestones: tuple[int, ...]
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        # Hydra hands over a list
        object.__setattr__(self, "milestones", tuple(self.milestones))
        _require_run_length(self.epochs, self.warmup_steps)
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise ValueError(f"schedule.milestones must be rising epoch counts from 1; got {list(self.milestones)}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"schedule.gamma must be in (0, 1]; got {self.gamma}")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        epoch = step // steps_per_epoch
        cuts = sum(epoch >= milestone for milestone in self.milestones)
        return self.gamma**cuts * _warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from the full rate to `final_factor` of it, over the run.

    Args:
        epochs: Length of the run.
        warmup_steps: Optimizer steps over which the rates rise linearly from zero, before the cosine.
        final_factor: What is left of the rates at the end.

    Raises:
        ValueError: A value is out of range.
    """

    epochs: int
    warmup_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        _require_run_length(self.epochs, self.warmup_steps)
        if not 0 <= self.final_factor <= 1:
            raise ValueError(f"schedule.final_factor must be in [0, 1]; got {self.final_factor}")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        if step < self.warmup_steps:
            return _warmup_factor(step, self.warmup_steps)
        length = max(1, self.epochs * steps_per_epoch - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / length)
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * progress))


class LRSchedule:
    """Sets the rates of an optimizer's groups along a curve.

    Args:
        optimizer: Its groups' rates at construction are what the curve's factor multiplies.
        curve: Factor by step.
        steps_per_epoch: Optimizer steps an epoch.
    """

    def __init__(self, optimizer: Optimizer, curve: LRCurve, steps_per_epoch: int) -> None:
        if steps_per_epoch < 1:
            raise ValueError(f"LRSchedule needs at least one step an epoch; got {steps_per_epoch}")
        self.optimizer = optimizer
        self.curve = curve
        self.steps_per_epoch = steps_per_epoch
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.num_steps = 0
        self._apply()

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.curve.epochs * self.steps_per_epoch

    def step(self) -> None:
        """Count one optimizer step and set the rates of the next."""
        self.num_steps += 1
        self._apply()

    def seek(self, epoch: int, steps_left: int) -> None:
        """Go to where `steps_left` steps of epoch `epoch` (from 0) remain: nothing, unless the pace has changed."""
        self.num_steps = (epoch + 1) * self.steps_per_epoch - steps_left
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "steps_per_epoch": self.steps_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the saved place in the run; the rates follow from the curve of this one.

        A run with other batches, and so other steps an epoch, goes on at the same fraction of an epoch.
        """
        epochs = state["num_steps"] / state["steps_per_epoch"]
        same_pace = state["steps_per_epoch"] == self.steps_per_epoch
        self.num_steps = state["num_steps"] if same_pace else round(epochs * self.steps_per_epoch)
        self._apply()

    def _apply(self) -> None:
        factor = self.curve.factor(self.num_steps, self.steps_per_epoch)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * factor


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _require_run_length(epochs: int, warmup_steps: int) -> None:
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"schedule.epochs must be at least 1, a whole number; got {epochs}")
    if warmup_steps < 0:
        raise ValueError(f"schedule.warmup_steps must be 0 or more; got {warmup_steps}")
