"""Timing GPU work: events, warm-up, medians with their spread, inputs rotated past the L2."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# three times the L2 of an H200: inputs of this size in all cannot be served from the cache of the last round
ROTATED_BYTES = 180 * 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call.

    Attributes:
        median_ms: Over all timed calls.
        p20_ms, p80_ms: Percentiles of the same.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        ordered = sorted(samples_ms)

        def at(fraction: float) -> float:
            return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]

        return cls(at(0.5), at(0.2), at(0.8))


def time_cuda(calls: Sequence[Callable[[], object]], *, num_warmup: int, num_iterations: int) -> list[float]:
    """Milliseconds between CUDA events around each call, host gaps included where the host is slower.

    Args:
        calls: The same work on different inputs, taken in turn.
        num_warmup: Calls before the clock starts, at least one of each.
        num_iterations: Timed calls.
    """
    for i in range(max(num_warmup, len(calls))):
        calls[i % len(calls)]()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_iterations)
    ]
    for i, (start, end) in enumerate(events):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def host_time_us(call: Callable[[], object], *, num_iterations: int = 200) -> float:
    """Microseconds until a call returns to Python, the GPU not waited for."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_iterations):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / num_iterations * 1e6


def num_rotated(input_bytes: int) -> int:
    """Copies of inputs of this size that together pass the L2, at least one."""
    return max(1, -(-ROTATED_BYTES // max(input_bytes, 1)))
