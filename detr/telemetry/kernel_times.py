"""What a profile says of the device: how long each kernel ran, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_NAME_LENGTH = 110


@dataclass(frozen=True)
class KernelTime:
    """A kernel, or on the CPU an operator, in a profile.

    Attributes:
        name: As the profiler gives it.
        total_ms: Sum of its runs, without what it calls.
        count: Runs.
    """

    name: str
    total_ms: float
    count: int


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """What to record of work on `device`."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def kernel_times(profiler: profile, device: torch.device) -> list[KernelTime]:
    """The kernels (copies included) that ran on `device`, or the operators of the CPU; the longest first."""
    on_gpu = device.type == "cuda"
    times = []
    for event in profiler.key_averages():
        # named ranges are shown on the device too, over the kernels they cover: counting both would double time
        if event.is_user_annotation or (event.device_type == DeviceType.CUDA) != on_gpu:
            continue
        total_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times.append(KernelTime(event.key, total_us / 1e3, event.count))
    return sorted(times, key=lambda time: -time.total_ms)


def kernel_table(times: Sequence[KernelTime], *, num_steps: int, num_rows: int = 30) -> str:
    """The `num_rows` longest kernels as a markdown table, milliseconds and runs a step.

    Args:
        times: From `kernel_times`.
        num_steps: Steps in the profile.
        num_rows: The rest are one row.
    """
    total_ms = sum(time.total_ms for time in times)
    lines = ["| kernel | ms a step | share | runs a step |", "| --- | --- | --- | --- |"]

    def add(name: str, ms: float, count: int) -> None:
        share = ms / total_ms if total_ms else 0.0
        lines.append(f"| {name} | {ms / num_steps:.3f} | {100 * share:.1f}% | {count / num_steps:.1f} |")

    for time in times[:num_rows]:
        shown = time.name if len(time.name) <= _NAME_LENGTH else time.name[:_NAME_LENGTH] + "..."
        # a bar would end the cell
        add(f"`{shown}`".replace("|", "\\|"), time.total_ms, time.count)
    rest = times[num_rows:]
    if rest:
        add(f"{len(rest)} others", sum(time.total_ms for time in rest), sum(time.count for time in rest))
    add("all", total_ms, sum(time.count for time in times))
    return "\n".join(lines) + "\n"
