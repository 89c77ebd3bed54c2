"""How a run is driven."""

from dataclasses import dataclass
from typing import get_args

from detr.engine.compile import ShapeMode
from detr.engine.step_monitor import NonFinitePolicy


@dataclass(frozen=True)
class TrainerSettings:
    """How a run is driven.

    Attributes:
        clip: Global L2 norm the gradients are clipped to; None does not clip.
        accumulate: Batches an optimizer step.
        ema_decay: Of the averaged copy, which then is what is evaluated; None keeps none.
        max_minutes: Of training, evaluations left out and all sittings together, after which the run evaluates and
            ends; looked at when it logs. The schedule is not shortened. None: it ends with the schedule.
        log_every: Optimizer steps between two logs.
        eval_every: Epochs between two evaluations; the last epoch is always evaluated.
        eval_every_minutes: Minutes of training between two evaluations within epochs, beside those of `eval_every`;
            looked at when it logs. None: at the end of epochs only.
        save_every: Epochs between two checkpoints; the last and a best epoch are always saved.
        save_every_steps: Optimizer steps between two checkpoints within an epoch; None saves at epochs only.
        keep_last: Checkpoints to keep beside best.pt, the newest (last.pt) included; if one is damaged, the run goes
            on from the one before.
        compile: Run the backbone, the neck and every layer compiled.
        compile_shapes: auto | static, see `compile_regions`.
        cuda_graphs: Launch forward and backward as captured graphs, one pair a padded size. See `GraphedDetector`.
        max_graphs: Padded sizes to capture; the rest runs uncaptured.
        recompute: Run the encoder's layers again in the backward pass instead of keeping what they computed.
        nonfinite: What happens when the loss or the gradients of a step are not finite: "skip" leaves it out, "stop"
            ends the run. Either way the fault is named and the batch written to the folder nonfinite.
        max_nonfinite: So many such steps in a row end the run.
        retry_oom: Train a step that does not fit into GPU memory in halves; one process only.
        hang_s: Seconds in one step, one wait for data or one batch of an evaluation after which every rank says
            where it is; None says nothing. See `Watchdog`.
        profile_steps: Steps to profile after a warm-up, into the run folder; 0 profiles none. See `StepProfiler`.
        num_pictures: Validation images to draw after each evaluation, where a logger takes pictures; 0 draws none.

    Raises:
        ValueError: A value is out of range.
    """

    clip: float | None = 0.1
    accumulate: int = 1
    ema_decay: float | None = None
    max_minutes: float | None = None
    log_every: int = 50
    eval_every: int = 1
    eval_every_minutes: float | None = None
    save_every: int = 1
    save_every_steps: int | None = 1000
    keep_last: int = 2
    compile: bool = False
    compile_shapes: ShapeMode = "auto"
    cuda_graphs: bool = False
    max_graphs: int = 64
    recompute: bool = False
    nonfinite: NonFinitePolicy = "skip"
    max_nonfinite: int = 50
    retry_oom: bool = False
    hang_s: float | None = 600.0
    profile_steps: int = 0
    num_pictures: int = 8

    def __post_init__(self) -> None:
        for name in ("accumulate", "log_every", "eval_every", "save_every", "keep_last", "max_nonfinite", "max_graphs"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} must be at least 1, a whole number; got {getattr(self, name)}")
        if self.save_every_steps is not None and self.save_every_steps < 1:
            raise ValueError(
                f"trainer.save_every_steps must be at least 1, or null for epochs only; got {self.save_every_steps}"
            )
        for name in ("profile_steps", "num_pictures"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"trainer.{name} must be a whole number, 0 for none; got {getattr(self, name)}")
        for name in ("max_minutes", "eval_every_minutes"):
            minutes = getattr(self, name)
            if minutes is not None and (isinstance(minutes, str) or not minutes > 0):
                raise ValueError(f"trainer.{name} must be positive, or null for none; got {minutes}")
        if self.hang_s is not None and (isinstance(self.hang_s, str) or not self.hang_s > 0):
            raise ValueError(f"trainer.hang_s must be positive, or null to watch nothing; got {self.hang_s}")
        if self.nonfinite not in get_args(NonFinitePolicy):
            raise ValueError(f"trainer.nonfinite must be skip or stop; got {self.nonfinite!r}")
        # the negation also refuses NaN
        if self.clip is not None and (isinstance(self.clip, str) or not self.clip > 0):
            raise ValueError(f"trainer.clip must be positive, or null for no clipping; got {self.clip}")
        if self.cuda_graphs:
            self._check_cuda_graphs()

    def _check_cuda_graphs(self) -> None:
        if self.recompute:
            raise ValueError(
                "trainer.cuda_graphs=true cannot repeat the random numbers that trainer.recompute=true needs; set one "
                "of them to false"
            )
        # gradients of a captured pass live in its buffers, where the next pass writes its own
        if self.accumulate > 1 or self.retry_oom:
            found = f"trainer.accumulate={self.accumulate}" if self.accumulate > 1 else "trainer.retry_oom=true"
            raise ValueError(
                f"trainer.cuda_graphs=true takes one batch an optimizer step; got {found}. Set one of them back"
            )
