"""Timing of whole training steps: the same `train_step` that trains."""

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

from detr.benchmark.step_data import StepBatches
from detr.engine.state import TrainState
from detr.engine.step import train_step
from detr.telemetry.timer import PhaseTimer

PHASES = ("data", "h2d", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class StepTimes:
    """Times of training steps, in milliseconds.

    Attributes:
        step_ms: Median over the timed steps of one step: host, device and the wait for the batch together.
        step_ms_p20: 20th percentile.
        step_ms_p80: 80th percentile.
        step_ms_mean: Mean.
        phases_ms: Median of each of `PHASES`, on the device; `data` on the host.
        padded_mpx: Mean size of an image of the timed steps, with its padding, in millions of pixels.
        num_graphs: Graphs compiled in this process so far.
        num_recompiles: Of them during the timed steps.
        peak_gib: Most memory in tensors; None on the CPU.
        reserved_gib: Most memory the allocator held; likewise.
        loss: Of the last step, a sign that it trained.
        warmup_s: Wall time of the warm-up.
        steps_s: Wall time of the timed steps.
    """

    step_ms: float
    step_ms_p20: float
    step_ms_p80: float
    step_ms_mean: float
    phases_ms: dict[str, float]
    padded_mpx: float
    num_graphs: int
    num_recompiles: int
    peak_gib: float | None
    reserved_gib: float | None
    loss: float
    warmup_s: float
    steps_s: float


def measure_steps(state: TrainState, supply: StepBatches, *, num_warmup: int, num_steps: int) -> StepTimes:
    """Train on the batches of `supply` and time it, first whole steps, then as many with their phases.

    Args:
        state: What is trained; its weights change.
        supply: Batches of one optimizer step each.
        num_warmup: Steps before the clock starts: compilation, autotuning, allocator.
        num_steps: Timed steps.

    Raises:
        ValueError: There is no step to warm up with or to time.
    """
    if num_warmup < 1 or num_steps < 1:
        raise ValueError(f"needs num_warmup >= 1 and num_steps >= 1; got {num_warmup} and {num_steps}")
    device, batches = state.device, supply.batches
    on_gpu = device.type == "cuda"
    started_s = time.perf_counter()
    for _ in range(num_warmup):
        train_step(state, [next(batches)])
    for _ in range(supply.num_ahead):
        next(batches)
    _wait(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    num_graphs = _num_graphs()
    warm_s = time.perf_counter()
    # no spans here: their events would add to the launches that bound small batches
    marks = [_mark(device)]
    num_pixels = num_images = 0
    for _ in range(num_steps):
        batch = next(batches)
        result = train_step(state, [batch])
        marks.append(_mark(device))
        num_images += len(batch)
        num_pixels += batch.images.padding_mask.numel()
    _wait(device)
    num_recompiles = _num_graphs() - num_graphs
    step_ms = [_elapsed_ms(start, end) for start, end in itertools.pairwise(marks)]
    peak_gib = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    reserved_gib = torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None
    timer = PhaseTimer(device)
    for _ in range(num_steps):
        with timer.host_span("data"):
            batch = next(batches)
        result = train_step(state, [batch], timer)
    phases = timer.read_ms()
    ordered = sorted(step_ms)
    return StepTimes(
        step_ms=statistics.median(ordered),
        step_ms_p20=ordered[len(ordered) // 5],
        step_ms_p80=ordered[len(ordered) * 4 // 5],
        step_ms_mean=statistics.fmean(ordered),
        phases_ms={name: statistics.median(phases[name]) for name in PHASES if name in phases},
        padded_mpx=num_pixels / num_images / 1e6,
        num_graphs=_num_graphs(),
        num_recompiles=num_recompiles,
        peak_gib=peak_gib,
        reserved_gib=reserved_gib,
        loss=float(result.loss),
        warmup_s=warm_s - started_s,
        steps_s=time.perf_counter() - warm_s,
    )


def record_losses(state: TrainState, supply: StepBatches, *, num_steps: int) -> tuple[float, ...]:
    """Train `num_steps` steps and return the loss of each."""
    losses = [train_step(state, [next(supply.batches)]).loss.clone() for _ in range(num_steps)]
    return tuple(torch.stack(losses).tolist())


def _num_graphs() -> int:
    """Graphs that torch.compile made in this process."""
    return int(counters["stats"]["unique_graphs"])


def _mark(device: torch.device) -> "torch.cuda.Event | float":
    """This moment of the device's work, or of the clock on the CPU."""
    if device.type != "cuda":
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
