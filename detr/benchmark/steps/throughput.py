"""Timing of whole training steps: the same `train_step` that trains."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

from detr.benchmark.steps.data import StepBatches
from detr.benchmark.steps.whole_steps import WholeSteps
from detr.engine.state import TrainState
from detr.engine.step import train_step
from detr.structures import Batch
from detr.telemetry.timer import PhaseTimer

PHASES = ("data", "h2d", "forward", "loss", "backward", "all_reduce", "optimizer")


@dataclass(frozen=True)
class StepTimes:
    """Times of our training steps.

    Attributes:
        whole: Of steps timed as a whole.
        phases_ms: Median of each of `PHASES` in further steps, on the device; `data` on the host.
        num_graphs: Graphs compiled in this process so far.
        loss: Of the last step, a sign that it trained.
        steps_s: Wall time of all timed steps.
    """

    whole: WholeSteps
    phases_ms: dict[str, float]
    num_graphs: int
    loss: float
    steps_s: float


def measure_steps(state: TrainState, supply: StepBatches, *, num_warmup: int, num_steps: int) -> StepTimes:
    """Train on the batches of `supply` and time it, first whole steps, then as many with their phases.

    Args:
        state: What is trained; its weights change.
        supply: Batches of one optimizer step each.
        num_warmup: See `time_steps`.
        num_steps: See `time_steps`.
    """
    started_s = time.perf_counter()
    whole = time_steps(
        lambda batch: train_step(state, [batch]), supply, state.device, num_warmup=num_warmup, num_steps=num_steps
    )
    timer = PhaseTimer(state.device)
    for _ in range(num_steps):
        with timer.host_span("data"):
            batch = next(supply.batches)
        result = train_step(state, [batch], timer)
    phases = timer.read_ms()
    return StepTimes(
        whole=whole,
        phases_ms={name: statistics.median(phases[name]) for name in PHASES if name in phases},
        num_graphs=_num_graphs(),
        loss=float(result.loss),
        steps_s=time.perf_counter() - started_s - whole.warmup_s,
    )


def time_steps(
    step: Callable[[Batch], object], supply: StepBatches, device: torch.device, *, num_warmup: int, num_steps: int
) -> WholeSteps:
    """Time `step` on the batches of `supply`, whoever's step it is.

    Args:
        step: Does one optimizer step.
        supply: Its batches.
        device: What it runs on.
        num_warmup: Steps before the clock starts: compilation, autotuning, allocator.
        num_steps: Timed steps.

    Raises:
        ValueError: There is no step to warm up with or to time.
    """
    if num_warmup < 1 or num_steps < 1:
        raise ValueError(f"needs num_warmup >= 1 and num_steps >= 1; got {num_warmup} and {num_steps}")
    on_gpu = device.type == "cuda"
    started_s = time.perf_counter()
    for _ in range(num_warmup):
        step(next(supply.batches))
    for _ in range(supply.num_ahead):
        next(supply.batches)
    _wait(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    num_graphs = _num_graphs()
    warmup_s = time.perf_counter() - started_s
    # no spans here: their events would add to the launches that bound small batches
    marks = [_mark(device)]
    num_pixels = num_images = 0
    for _ in range(num_steps):
        batch = next(supply.batches)
        step(batch)
        marks.append(_mark(device))
        num_images += len(batch)
        num_pixels += batch.images.pixels[:, 0].numel()
    _wait(device)
    return WholeSteps(
        step_ms=tuple(sorted(_elapsed_ms(start, end) for start, end in itertools.pairwise(marks))),
        padded_mpx=num_pixels / num_images / 1e6,
        num_recompiles=_num_graphs() - num_graphs,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        reserved_gib=torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None,
        warmup_s=warmup_s,
    )


def record_losses(state: TrainState, supply: StepBatches, *, num_steps: int) -> tuple[float, ...]:
    """Train `num_steps` steps and return the loss of each."""
    losses = [train_step(state, [next(supply.batches)]).loss.clone() for _ in range(num_steps)]
    return tuple(torch.stack(losses).tolist())


def _num_graphs() -> int:
    """Graphs that torch.compile made in this process."""
    return int(counters["stats"]["unique_graphs"])


def _mark(device: torch.device) -> "torch.cuda.Event | float":
    """This moment of the device's work; on anything but CUDA, of the clock once the device is done."""
    if device.type != "cuda":
        _wait(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return (end - start) * 1e3
    return float(start.elapsed_time(end))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
