"""The epoch loop: steps, logs, evaluation, checkpoints, resume."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from detr.data import DetectionLoader
from detr.distributed import DistributedContext, all_reduce_mean, barrier, gather_objects, is_main
from detr.engine.checkpoint import Checkpoint, copy_checkpoint, save_checkpoint
from detr.engine.evaluate import evaluate
from detr.engine.random_state import random_state
from detr.engine.restore import Progress
from detr.engine.run_folder import RunFolder, write_json
from detr.engine.state import TrainState
from detr.engine.step import StepResult, train_step
from detr.engine.step_profiler import StepProfiler
from detr.evaluation import CocoEvaluator, CocoMetrics, PostProcess
from detr.structures import Batch, ClassTable
from detr.telemetry.loggers import ConsoleLogger, Logger
from detr.telemetry.metrics import RunningMean
from detr.visualize import plot_curves

_logger = logging.getLogger(__name__)

# a run that detects next to nothing after a quarter of its epochs, and at least so many, has a fault
STUCK_AP = 0.02
STUCK_EPOCHS = 5


@dataclass(frozen=True)
class TrainerSettings:
    """How a run is driven.

    Attributes:
        clip: Global L2 norm the gradients are clipped to; None does not clip.
        accumulate: Batches an optimizer step.
        ema_decay: Of the averaged copy, which then is what is evaluated; None keeps none.
        log_every: Optimizer steps between two logs.
        eval_every: Epochs between two evaluations; the last epoch is always evaluated.
        save_every: Epochs between two checkpoints; the last and a best epoch are always saved.
        keep_last: Checkpoints of past epochs to keep; 1 keeps last.pt only.
        compile: Run the backbone, the neck and every layer compiled.
        profile_steps: Steps to profile after a warm-up, into the run folder; 0 profiles none. See `StepProfiler`.

    Raises:
        ValueError: A value is out of range.
    """

    clip: float | None = 0.1
    accumulate: int = 1
    ema_decay: float | None = None
    log_every: int = 50
    eval_every: int = 1
    save_every: int = 1
    keep_last: int = 1
    compile: bool = False
    profile_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("accumulate", "log_every", "eval_every", "save_every", "keep_last"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} must be at least 1, a whole number; got {getattr(self, name)}")
        if not isinstance(self.profile_steps, int) or self.profile_steps < 0:
            raise ValueError(f"trainer.profile_steps must be a whole number, 0 for none; got {self.profile_steps}")
        # the negation also refuses NaN
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"trainer.clip must be positive, or null for no clipping; got {self.clip}")


@dataclass(frozen=True)
class RunDescription:
    """What a checkpoint says about its run beside its state; see `Checkpoint`."""

    class_table: ClassTable
    preprocessing: dict[str, Any]
    config: dict[str, Any]


class _Interval:
    """What happened since the last log: means of the step's scalars, speed, time without data."""

    def __init__(self) -> None:
        self._means = RunningMean()
        self.restart()

    def restart(self) -> None:
        self._means.reset()
        self._num_images = 0
        self._waited_s = 0.0
        self._start_s = time.perf_counter()

    def time_waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield `batches`, adding up how long each took to come."""
        iterator = iter(batches)
        while True:
            asked_s = time.perf_counter()
            batch = next(iterator, None)
            self._waited_s += time.perf_counter() - asked_s
            if batch is None:
                return
            yield batch

    def add(self, result: StepResult) -> None:
        self._num_images += result.num_images
        self._means.add(step_values(result))

    def read(self, context: DistributedContext) -> dict[str, float]:
        """The numbers to log. A collective, and the only point where the host waits for the steps."""
        values = self._means.read(all_reduce_mean)
        elapsed_s = time.perf_counter() - self._start_s
        values["train/images_per_s"] = self._num_images * context.world_size / elapsed_s
        values["train/data_share"] = self._waited_s / elapsed_s
        if context.device.type == "cuda":
            values["train/gpu_memory_gib"] = torch.cuda.max_memory_allocated(context.device) / 2**30
        return values


class Trainer:
    """Trains to the end of the schedule, from the start or from a checkpoint.

    Args:
        state: Model, loss, optimizer and what belongs to them.
        train_loader: This rank's training batches.
        val_loader: This rank's validation batches.
        evaluator: Of the validation split.
        postprocess: Output to detections.
        settings: Cadences.
        folder: Where checkpoints and metrics go; rank 0 writes.
        description: What a checkpoint says about the run.
        context: Ranks and device.
        progress: Where to go on; from `resume`, or `Progress()` for a new run.
        logger: Takes the numbers; enabled on rank 0 only.
        console: Shows progress between two logs; None on the other ranks.
    """

    def __init__(
        self,
        state: TrainState,
        train_loader: DetectionLoader,
        val_loader: DetectionLoader,
        evaluator: CocoEvaluator,
        postprocess: PostProcess,
        *,
        settings: TrainerSettings,
        folder: RunFolder,
        description: RunDescription,
        context: DistributedContext,
        progress: Progress,
        logger: Logger,
        console: ConsoleLogger | None = None,
    ) -> None:
        self.state = state
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.evaluator = evaluator
        self.postprocess = postprocess
        self.settings = settings
        self.folder = folder
        self.description = description
        self.context = context
        self.logger = logger
        self.console = console
        self.progress = progress
        self._profiler = None
        if settings.profile_steps and is_main():
            self._profiler = StepProfiler(state.device, folder.path, num_steps=settings.profile_steps)
        if folder.is_new:
            # the best checkpoint of the run that this one goes on from stays in its own folder
            progress.best = {}

    @property
    def num_epochs(self) -> int:
        return self.state.schedule.curve.epochs

    def fit(self) -> dict[str, Any]:
        """Train the epochs that are left; returns the numbers of the last evaluation."""
        if self.progress.epoch >= self.num_epochs:
            _logger.info(
                "the run already has its %d epochs; resume=%s schedule.epochs=N goes on",
                self.num_epochs,
                self.folder.last,
            )
        if self._profiler is not None:
            self._profiler.start()
        try:
            if self.progress.epoch > 0 and not self.progress.metrics and self._is_evaluation_due():
                # the run ended between an epoch and its evaluation
                self._evaluate_and_save()
            while self.progress.epoch < self.num_epochs:
                self._run_epoch()
        finally:
            if self._profiler is not None:
                self._profiler.close()
            self.logger.close()
        return self.progress.metrics

    def _run_epoch(self) -> None:
        """Train an epoch; evaluate and save where it is due."""
        self._train_epoch()
        self.progress.epoch += 1
        if self._is_evaluation_due():
            # an evaluation that fails must not cost the epoch; no metrics: it is made up for on resume
            self.progress.metrics = {}
            self._save(is_best=False)
            self._evaluate_and_save()
        elif self.progress.epoch % self.settings.save_every == 0:
            self._save(is_best=False)

    def _is_evaluation_due(self) -> bool:
        return self.progress.epoch >= self.num_epochs or self.progress.epoch % self.settings.eval_every == 0

    def _evaluate_and_save(self) -> None:
        self._save(self._evaluate())

    def _train_epoch(self) -> None:
        self.train_loader.set_epoch(self.progress.epoch)
        interval = _Interval()
        skipped = torch.zeros((), device=self.state.device)
        num_steps = 0
        for window in windows(interval.time_waiting(self.train_loader), self.settings.accumulate):
            result = train_step(self.state, window)
            if self._profiler is not None:
                self._profiler.step()
            self.progress.global_step += 1
            num_steps += 1
            skipped += result.skipped
            interval.add(result)
            if self.console is not None:
                self.console.advance(self.progress.global_step)
            if self.progress.global_step % self.settings.log_every == 0:
                values = interval.read(self.context) | {"train/lr": result.lr, "epoch": self.progress.epoch + 1}
                if self.state.compiled is not None:
                    # still growing after the first epochs: set data.pad_to, so that fewer shapes occur
                    values["train/compiled_graphs"] = self.state.compiled.num_graphs
                self.logger.log(self.progress.global_step, values)
                interval.restart()
        self._require_progress(int(skipped), num_steps)

    def _require_progress(self, num_skipped: int, num_steps: int) -> None:
        """Say how many steps of an epoch were skipped; all of them is the end."""
        if num_skipped == num_steps:
            raise FloatingPointError(
                f"none of the {num_steps} steps of epoch {self.progress.epoch + 1} had finite gradients, so "
                "nothing was learned. Lower optimizer.lr, or use precision=fp32 or bf16"
            )
        if num_skipped:
            _logger.warning(
                "epoch %d: %d of %d steps were skipped because their gradients were not finite",
                self.progress.epoch + 1,
                num_skipped,
                num_steps,
            )

    def _evaluate(self) -> bool:
        """Evaluate, log, write metrics.json; returns whether this is the best epoch so far."""
        batches: Iterable[Batch] = self.val_loader
        if self.console is not None:
            batches = self.console.track(batches, "evaluate", num_items=len(self.val_loader))
        metrics = evaluate(
            self.state.evaluated,
            batches,
            self.evaluator,
            self.postprocess,
            precision=self.state.precision,
            device=self.state.device,
        )
        self.progress.metrics = metrics.to_dict()
        is_best = self.progress.best.get("AP", float("-inf")) < metrics.AP
        if is_best:
            self.progress.best = {"epoch": self.progress.epoch, "AP": metrics.AP}
        self.logger.log(self.progress.global_step, eval_values(metrics) | {"epoch": self.progress.epoch})
        if is_main():
            write_json(self.folder.metrics, self.progress.metrics)
            plot_curves(self.folder.metrics_log, self.folder.path)
        self._warn_if_stuck(self.progress.best["AP"])
        return is_best

    def _warn_if_stuck(self, best_ap: float) -> None:
        if best_ap < STUCK_AP and self.progress.epoch >= max(STUCK_EPOCHS, self.num_epochs // 4):
            _logger.warning(
                "AP is at most %.3f after %d epochs. Look at: train/loss (does it fall?), train/grad_norm (hundreds "
                "or more mean too high an optimizer.lr), the learning rate for this batch size (optimizer.scale_lr), "
                "the boxes and names of the training images, backbone.pretrained (random weights need many epochs)",
                best_ap,
                self.progress.epoch,
            )

    def _save(self, is_best: bool) -> None:
        random_states = gather_objects(random_state(self.state.device))
        if is_main():
            checkpoint = self._checkpoint(random_states)
            if is_best:
                # best first: a run killed in between evaluates again, instead of missing its best for good
                save_checkpoint(checkpoint, self.folder.best)
                copy_checkpoint(self.folder.best, self.folder.last)
            else:
                save_checkpoint(checkpoint, self.folder.last)
            if self.settings.keep_last > 1:
                copy_checkpoint(self.folder.last, self.folder.path / f"epoch_{self.progress.epoch:04d}.pt")
                for old in sorted(self.folder.path.glob("epoch_*.pt"))[: -self.settings.keep_last]:
                    old.unlink()
        barrier()

    def _checkpoint(self, random_states: list[dict[str, Any]]) -> Checkpoint:
        state = self.state
        return Checkpoint(
            epoch=self.progress.epoch,
            global_step=self.progress.global_step,
            model=state.detector.state_dict(),
            optimizer=state.optimizer.state_dict(),
            schedule=state.schedule.state_dict(),
            scaler=state.scaler.state_dict(),
            ema=None if state.ema is None else state.ema.state_dict(),
            random_states=random_states,
            class_table=self.description.class_table,
            preprocessing=self.description.preprocessing,
            config=self.description.config,
            metrics=self.progress.metrics,
            best=self.progress.best,
        )


def steps_per_epoch(loader: DetectionLoader, accumulate: int) -> int:
    """Optimizer steps of an epoch; the last takes the batches that are left."""
    return -(-len(loader) // accumulate)


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches; the last may be shorter."""
    window: list[Batch] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def step_values(result: StepResult) -> dict[str, Tensor]:
    """The scalars of a step under the names they are logged with."""
    terms = {f"train/{name}": term for name, term in result.terms.items()}
    return {
        "train/loss": result.loss,
        **terms,
        "train/class_error": result.class_error,
        "train/grad_norm": result.grad_norm,
        "train/skipped": result.skipped,
    }


def eval_values(metrics: CocoMetrics) -> dict[str, float]:
    """The numbers of an evaluation under the names they are logged with; classes without objects are left out."""
    per_class = {f"val/AP/{name}": ap for name, ap in metrics.per_class.items() if ap is not None}
    return {f"val/{name}": value for name, value in metrics.numbers().items()} | per_class
