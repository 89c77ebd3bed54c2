"""Timing of whole training steps: the same `train_step` that trains."""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from detr.engine.state import TrainState
from detr.engine.step import train_step
from detr.structures import Batch, ImageBatch, Target
from detr.telemetry.timer import PhaseTimer

PHASES = ("data", "h2d", "forward", "loss", "backward", "optimizer")

# what the kernels of multi-scale deformable attention have in their names, in any backend
_MSDA_KERNELS = ("msda", "grid_sampler_2d")


@dataclass(frozen=True)
class StepTimes:
    """Times of training steps, in milliseconds.

    Attributes:
        step_ms: Median over the timed steps of one step, host and device together.
        step_ms_p20: 20th percentile.
        step_ms_p80: 80th percentile.
        phases_ms: Median of each of `PHASES`, on the device; `data` on the host.
        peak_gib: Most memory the allocator held; None on the CPU.
        loss: Of the last step, a sign that it trained.
    """

    step_ms: float
    step_ms_p20: float
    step_ms_p80: float
    phases_ms: dict[str, float]
    peak_gib: float | None
    loss: float


def synthetic_batches(
    *, batch_size: int, height: int, width: int, targets_per_image: int, num_classes: int, num_batches: int = 4
) -> list[Batch]:
    """Random images of one size with random boxes, on the CPU; pinned where there is a GPU to send them to.

    Every image fills its batch but for its last 16 rows and 8 columns, in turn, so padding is not optimised away.

    Args:
        batch_size: Images a batch.
        height: Padded height in pixels.
        width: Padded width in pixels.
        targets_per_image: Boxes an image.
        num_classes: Labels are drawn from these.
        num_batches: Different batches, to be cycled through.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(num_batches):
        images = [
            torch.randint(
                0,
                256,
                (3, height - 16 * (index % 2), width - 8 * (index % 3 // 2)),
                dtype=torch.uint8,
                generator=generator,
            )
            for index in range(batch_size)
        ]
        targets = tuple(
            Target(
                torch.randint(0, num_classes, (targets_per_image,), generator=generator),
                torch.rand(targets_per_image, 4, generator=generator) * 0.4 + 0.1,
                image_id=index,
                orig_size=(height, width),
            )
            for index in range(batch_size)
        )
        batch = Batch(ImageBatch.from_images(images), targets)
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def measure_steps(state: TrainState, batches: Iterable[Batch], *, num_warmup: int, num_steps: int) -> StepTimes:
    """Train on `batches`, again and again, and time it.

    Args:
        state: What is trained; its weights change.
        batches: Of one optimizer step each.
        num_warmup: Steps before the clock starts: compilation, autotuning, allocator.
        num_steps: Timed steps.
    """
    device = state.device
    stream = _cycle(batches)
    for _ in range(num_warmup):
        train_step(state, [next(stream)])
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # no spans here: their events would add to the launches that bound small batches
    marks = [_mark(device)]
    for _ in range(num_steps):
        result = train_step(state, [next(stream)])
        marks.append(_mark(device))
    _wait(device)
    step_ms = [_elapsed_ms(start, end) for start, end in itertools.pairwise(marks)]
    peak_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    timer = PhaseTimer(device)
    for _ in range(num_steps):
        with timer.host_span("data"):
            batch = next(stream)
        result = train_step(state, [batch], timer)
    phases = timer.read_ms()
    ordered = sorted(step_ms)
    return StepTimes(
        step_ms=statistics.median(ordered),
        step_ms_p20=ordered[len(ordered) // 5],
        step_ms_p80=ordered[len(ordered) * 4 // 5],
        phases_ms={name: statistics.median(phases[name]) for name in PHASES if name in phases},
        peak_gib=peak_gib,
        loss=float(result.loss),
    )


def msda_share(state: TrainState, batches: Iterable[Batch], *, num_steps: int = 3) -> float:
    """Share of the device's kernel time that multi-scale deformable attention takes, in [0, 1].

    Of the reference only grid_sample itself is counted, not the arithmetic around it.
    """
    stream = _cycle(batches)
    activities = [ProfilerActivity.CPU]
    if state.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            train_step(state, [next(stream)])
        _wait(state.device)
    on_device = state.device.type == "cuda"
    total = attention = 0.0
    for event in profiler.key_averages():
        if on_device and event.device_type != DeviceType.CUDA:
            # an operator, whose kernels are events of their own
            continue
        own_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        total += own_us
        if any(name in event.key for name in _MSDA_KERNELS):
            attention += own_us
    return attention / total if total else 0.0


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


def _cycle(batches: Iterable[Batch]) -> Iterator[Batch]:
    return itertools.cycle(batches) if isinstance(batches, list) else _repeat(batches)


def _repeat(batches: Iterable[Batch]) -> Iterator[Batch]:
    """A loader, epoch after epoch."""
    while True:
        yield from batches


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
