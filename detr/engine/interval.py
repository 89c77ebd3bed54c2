"""What a run says about its steps: the batches of a step, and the numbers between two logs."""

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from detr.data import DetectionLoader
from detr.distributed import DistributedContext, all_reduce_mean
from detr.engine.step import StepResult
from detr.evaluation import CocoMetrics
from detr.structures import Batch
from detr.telemetry.metrics import RunningMean


class Interval:
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


def steps_per_epoch(loader: DetectionLoader, accumulate: int) -> int:
    """Optimizer steps of an epoch; the last takes the batches that are left."""
    return -(-len(loader) // accumulate)


def steps_left(loader: DetectionLoader, accumulate: int, *, epochs: int, epoch: int, epoch_samples: int) -> int:
    """Optimizer steps to the end of the schedule, from within an epoch; the loader is left at that place.

    Args:
        loader: Of the training batches.
        accumulate: Batches an optimizer step.
        epochs: Of the schedule.
        epoch: Epochs finished.
        epoch_samples: Images of the next one that all ranks together have trained on.
    """
    if epoch >= epochs:
        return 0
    loader.set_epoch(epoch)
    whole = steps_per_epoch(loader, accumulate)
    # beyond its end where images were taken out of the dataset since the run was saved
    loader.set_epoch(epoch, start=min(epoch_samples, loader.num_samples))
    return steps_per_epoch(loader, accumulate) + (epochs - epoch - 1) * whole


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
