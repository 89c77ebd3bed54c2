"""The epoch loop: steps, logs, evaluation, checkpoints, resume."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from detr.data import DetectionLoader
from detr.distributed import (
    DistributedContext,
    barrier,
    broadcast_object,
    broadcast_tensors,
    gather_objects,
    is_main,
)
from detr.engine.checkpoint_writer import CheckpointWriter
from detr.engine.evaluate import evaluate
from detr.engine.interval import Interval, eval_values, steps_per_epoch, windows
from detr.engine.media import EvaluationMedia
from detr.engine.out_of_memory import give_up_graphs, out_of_memory_message
from detr.engine.preemption import Preempted, StopRequest
from detr.engine.progress_checks import StuckWarning, require_progress
from detr.engine.random_state import random_state
from detr.engine.restore import Progress
from detr.engine.run_checkpoint import RunDescription, run_checkpoint
from detr.engine.run_folder import RunFolder, write_json
from detr.engine.run_lock import RunLock
from detr.engine.settings import TrainerSettings
from detr.engine.state import TrainState, has_batch_statistics
from detr.engine.step import StepResult, train_step
from detr.engine.step_monitor import StepMonitor
from detr.engine.step_profiler import StepProfiler
from detr.engine.training_clock import TrainingClock
from detr.engine.watchdog import Watchdog
from detr.evaluation import CocoEvaluator, CocoMetrics, PostProcess
from detr.structures import Batch
from detr.telemetry.loggers import ConsoleLogger, Logger
from detr.visualize import plot_curves

_logger = logging.getLogger(__name__)


class Trainer:
    """Trains to the end of the schedule or of its time, from the start or from a checkpoint.

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
        media: Logs pictures and tables of each evaluation; None on the other ranks, or where nobody takes them.
        lock: On the folder; see `CheckpointWriter`.
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
        media: EvaluationMedia | None = None,
        lock: RunLock | None = None,
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
        self.media = media
        self.progress = progress
        self.writer = CheckpointWriter(folder, keep_last=settings.keep_last, lock=lock)
        if state.graphs is not None:
            # the thread that writes waits for the device, which ends a capture under way
            state.graphs.before_capture = self.writer.wait
        self.stop = StopRequest()
        self.clock = TrainingClock(progress.train_s)
        self._time_is_up = False
        self.monitor = StepMonitor(
            state, folder.path, rank=context.rank, policy=settings.nonfinite, max_in_row=settings.max_nonfinite
        )
        self.watchdog = Watchdog(settings.hang_s, rank=context.rank, world_size=context.world_size, store=context.store)
        self._stuck_warning = StuckWarning()
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
        """Train the epochs that are left; returns the numbers of the last evaluation.

        Raises:
            Preempted: A signal asked for an end. The checkpoint is written.
            FloatingPointError: Nothing was learned, or too many steps were not finite.
            OSError: A checkpoint or metrics.jsonl could not be written.
        """
        self._time_is_up = self._is_time_up()
        if self.progress.epoch >= self.num_epochs:
            _logger.info(
                "the run already has its %d epochs; resume=%s schedule.epochs=N goes on",
                self.num_epochs,
                self.folder.last,
            )
        elif self._time_is_up:
            _logger.info("the run has trained for trainer.max_minutes; with more of them it goes on")
        if self._profiler is not None:
            self._profiler.start()
        try:
            with self.stop, self.watchdog:
                if self._missed_evaluation():
                    self._evaluate_and_save()
                while self.progress.epoch < self.num_epochs and not self._time_is_up:
                    self._run_epoch()
                self._finish_saving()
        finally:
            if self._profiler is not None:
                self._profiler.close()
            try:
                self.writer.wait()
            finally:
                self.logger.close()
        return self.progress.metrics

    def _missed_evaluation(self) -> bool:
        """Whether the run ended between training and its evaluation."""
        at_boundary = (self.progress.epoch > 0 and self.progress.epoch_samples == 0) or self._time_is_up
        return at_boundary and not self.progress.metrics and self._is_evaluation_due()

    def _run_epoch(self) -> None:
        """Train an epoch, or what there is time for; evaluate and save where it is due."""
        with self.clock.running(), self.train_loader.naming_dead_workers(), self.val_loader.naming_dead_workers():
            self._train_epoch()
        if not self._time_is_up:
            self.progress.epoch += 1
            self.progress.epoch_samples = 0
        if self._is_evaluation_due():
            # an evaluation that fails must not cost the epoch; without metrics it is made up for on resume
            self._save(is_best=False)
            self._evaluate_and_save()
        elif self.progress.epoch % self.settings.save_every == 0:
            self._save(is_best=False)

    def _is_evaluation_due(self) -> bool:
        return self._is_last() or self.progress.epoch % self.settings.eval_every == 0

    def _is_minute_evaluation_due(self) -> bool:
        """By the clock of rank 0. A collective where it is asked for."""
        every = self.settings.eval_every_minutes
        return every is not None and broadcast_object(self.clock.passed(every))

    def _is_last(self) -> bool:
        return self._time_is_up or self.progress.epoch >= self.num_epochs

    def _is_time_up(self) -> bool:
        """By the clock of rank 0. A collective where there is a limit."""
        limit = self.settings.max_minutes
        return limit is not None and broadcast_object(self.clock.minutes >= limit)

    def _evaluate_and_save(self) -> None:
        metrics, is_best = self._evaluate()
        self._save(is_best)
        if self.media is not None:
            self.media.log(self.evaluator, metrics, self.progress, is_last=self._is_last())

    def _train_epoch(self) -> None:
        """Train what is left of the epoch: all of it, unless the run was resumed within."""
        # beyond its end where images were taken out of the dataset since the run was saved
        start = min(self.progress.epoch_samples, self.train_loader.num_samples)
        self.train_loader.set_epoch(self.progress.epoch, start=start)
        self.state.schedule.seek(self.progress.epoch, steps_per_epoch(self.train_loader, self.settings.accumulate))
        self._enter("data")
        interval = Interval()
        skipped = torch.zeros((), device=self.state.device)
        num_steps = 0
        for window in windows(interval.time_waiting(self.train_loader), self.settings.accumulate):
            self._enter("training step")
            self.monitor.before_step()
            result = self._step(window)
            if self._profiler is not None:
                self._profiler.step()
            self.progress.global_step += 1
            # these weights are not evaluated
            self.progress.metrics = {}
            self.progress.epoch_samples += result.num_images * self.context.world_size
            num_steps += 1
            skipped += result.skipped
            interval.add(result)
            if self.console is not None:
                self.console.advance(self.progress.global_step)
            self.monitor.after_step(self.progress.global_step, window, result)
            if self.progress.global_step % self.settings.log_every == 0:
                self._log(interval, result.lr)
                # here the host has waited for the steps that the clock counts
                self._time_is_up = self._is_time_up()
                if not self._time_is_up and self._is_minute_evaluation_due():
                    with self.clock.paused():
                        self._save(is_best=False)
                        self._evaluate_and_save()
                    interval.restart()
            if result.num_stop_requests.read() > 0:
                self._save(is_best=False)
                self._leave()
            if self._is_step_save_due():
                self._save(is_best=False)
            if self._time_is_up:
                break
            self._enter("data")
        self.monitor.finish()
        require_progress(num_skipped=int(skipped), num_steps=num_steps, epoch=self.progress.epoch + 1)

    def _step(self, window: list[Batch]) -> StepResult:
        """One step.

        Raises:
            MemoryError: It does not fit into the GPU's memory.
        """
        try:
            return train_step(self.state, window, stop_requested=self.stop.requested)
        except torch.OutOfMemoryError as error:
            message = out_of_memory_message(window, self.state.device, is_captured=self.state.graphs is not None)
            raise MemoryError(message) from error

    def _make_room(self, batch: Batch) -> bool:
        """For a batch of an evaluation, beside the captured passes."""
        if self.state.graphs is None or self.state.graphs.num_graphs == 0:
            return False
        give_up_graphs(self.state, self.state.graphs, "an evaluation", [batch])
        return True

    def _enter(self, phase: str) -> None:
        self.watchdog.enter(self.progress.global_step, phase)

    def _is_step_save_due(self) -> bool:
        every = self.settings.save_every_steps
        return every is not None and self.progress.global_step % every == 0

    def _log(self, interval: Interval, lr: float) -> None:
        self.writer.check()
        values = interval.read(self.context) | {
            "train/lr": lr,
            "train/minutes": self.clock.minutes,
            "epoch": self.progress.epoch + 1,
        }
        if self.state.compiled is not None:
            # still growing after the first epochs: set data.pad_to, so that fewer shapes occur
            values["train/compiled_graphs"] = self.state.compiled.num_graphs
        self.logger.log(self.progress.global_step, values)
        interval.restart()

    def _evaluate(self) -> tuple[CocoMetrics, bool]:
        """Evaluate, log, write metrics.json; returns the numbers, and whether they are the best so far."""
        if has_batch_statistics(self.state.evaluated):
            # ranks have seen different batches since DDP last gave all of them those of rank 0; what is evaluated
            # is what the checkpoint holds, on any number of ranks
            broadcast_tensors(self.state.evaluated.buffers())
        batches: Iterable[Batch] = self.val_loader
        if self.console is not None:
            batches = self.console.track(batches, "evaluate", num_items=len(self.val_loader))
        metrics = evaluate(
            self.state.evaluated,
            self._until_stopped(batches),
            self.evaluator,
            self.postprocess,
            precision=self.state.precision,
            device=self.state.device,
            make_room=self._make_room,
        )
        self.progress.metrics = metrics.to_dict()
        is_best = self.progress.best.get("AP", float("-inf")) < metrics.AP
        if is_best:
            self.progress.best = {"epoch": self.progress.epoch, "AP": metrics.AP}
        position = {"epoch": self.progress.epoch, "train/minutes": self.clock.minutes}
        self.logger.log(self.progress.global_step, eval_values(metrics) | position)
        if is_main():
            write_json(self.folder.metrics, self.progress.metrics)
            plot_curves(self.folder.metrics_log, self.folder.path)
            self._stuck_warning.check(self.progress.best["AP"], epoch=self.progress.epoch, num_epochs=self.num_epochs)
        return metrics, is_best

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Leave an evaluation as soon as this rank is asked to: what was trained is saved, and gone on with."""
        for batch in batches:
            self._enter("evaluation")
            if self.stop.requested:
                self.writer.wait()
                raise Preempted(
                    f"stopped by a signal while it evaluated; {self.folder.last} holds what was trained, and the "
                    "same command goes on from there"
                )
            yield batch
        self._enter("scoring of the evaluation")

    def _save(self, is_best: bool) -> None:
        """Begin to save; training goes on meanwhile. A collective."""
        self._enter("saving")
        random_states = gather_objects(random_state(self.state.device))
        if is_main():
            checkpoint = run_checkpoint(
                self.state, self.progress, self.description, random_states=random_states, train_s=self.clock.seconds
            )
            self.writer.save(checkpoint, is_best=is_best)

    def _finish_saving(self) -> None:
        """Wait until the checkpoint is on the disk. A collective: no rank may end while rank 0 still writes."""
        self.writer.wait()
        barrier()

    def _leave(self) -> None:
        """End the run where it stands.

        Raises:
            Preempted: Always.
        """
        self._finish_saving()
        raise Preempted(
            f"stopped by a signal after step {self.progress.global_step}, which {self.folder.last} holds; the same "
            "command goes on from there"
        )
