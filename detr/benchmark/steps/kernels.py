"""What a profile and the debug modes of PyTorch say of a training step."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile

from detr.engine.state import TrainState
from detr.engine.step import train_step
from detr.structures import Batch
from detr.telemetry.kernel_times import KernelTime, kernel_times, profiler_activities

# what the kernels of multi-scale deformable attention have in their names: those of ops, and the reference's
_MSDA_KERNELS = ("msda", "grid_sampler_2d")
_NUM_TOP_KERNELS = 30


@dataclass(frozen=True)
class StepKernels:
    """The device's work in a step; on the CPU operators stand for kernels.

    Attributes:
        kernel_ms: Sum of all kernels, copies included.
        num_kernels: Their number.
        msda_forward_ms: Kernels of multi-scale deformable attention, forward. Of the reference only grid_sample
            itself is counted, not the arithmetic around it.
        msda_backward_ms: Likewise backward.
        top_ms: The longest kernels by name.
    """

    kernel_ms: float
    num_kernels: float
    msda_forward_ms: float
    msda_backward_ms: float
    top_ms: dict[str, float]

    @property
    def msda_share(self) -> float:
        """Of multi-scale deformable attention in all kernels, in [0, 1]."""
        return (self.msda_forward_ms + self.msda_backward_ms) / self.kernel_ms if self.kernel_ms else 0.0


def profile_kernels(state: TrainState, batches: Iterator[Batch], *, num_steps: int = 3) -> StepKernels:
    """Profile a few training steps."""
    window = [next(batches) for _ in range(num_steps)]
    with profile(activities=profiler_activities(state.device)) as profiler:
        for batch in window:
            train_step(state, [batch])
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
    return summarize(kernel_times(profiler, state.device), num_steps=num_steps)


def summarize(times: Sequence[KernelTime], *, num_steps: int) -> StepKernels:
    """Kernels of `num_steps` steps as means a step; `times` has the longest first."""
    forward_ms = backward_ms = 0.0
    for time in times:
        if any(name in time.name for name in _MSDA_KERNELS):
            if _is_backward(time.name):
                backward_ms += time.total_ms
            else:
                forward_ms += time.total_ms
    return StepKernels(
        kernel_ms=sum(time.total_ms for time in times) / num_steps,
        num_kernels=sum(time.count for time in times) / num_steps,
        msda_forward_ms=forward_ms / num_steps,
        msda_backward_ms=backward_ms / num_steps,
        top_ms={time.name: time.total_ms / num_steps for time in times[:_NUM_TOP_KERNELS]},
    )


def host_syncs(state: TrainState, batch: Batch) -> dict[str, int] | None:
    """Where the host waits for the device in one step: file and line, and how often; None on the CPU.

    Waits within the backward pass are shown at the line that started it.
    """
    if state.device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_step(state, [batch])
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = (
        "/".join([*Path(warning.filename).parts[-3:]]) + f":{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    )
    return dict(Counter(places))


def _is_backward(name: str) -> bool:
    if "grid_sampler_2d" in name:
        return "backward" in name
    # the CUDA kernels of the backward pass have several names, that of the forward pass is one
    return "forward" not in name
