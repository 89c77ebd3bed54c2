"""Where the time of a step goes, by named spans."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Times named spans: on a GPU with CUDA events, which do not make the host wait, else with its own clock.

    A CUDA span measures the work between its two events on the current stream. Spans may nest and repeat.

    Args:
        device: What the timed work runs on.
        enabled: False turns `span` and `host_span` into no-ops, so call sites need no branches.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._uses_events = device.type == "cuda"
        self._enabled = enabled
        self._host_spans: list[tuple[str, float]] = []
        self._event_spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what the device does between entry and exit."""
        if not self._enabled:
            yield
        elif self._uses_events:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._event_spans.append((name, start, end))
        else:
            with self.host_span(name):
                yield

    @contextmanager
    def host_span(self, name: str) -> Iterator[None]:
        """Time what the host does, as waiting for the data loader."""
        if not self._enabled:
            yield
            return
        start_s = time.perf_counter()
        yield
        self._host_spans.append((name, (time.perf_counter() - start_s) * 1e3))

    def read_ms(self) -> dict[str, list[float]]:
        """The durations of each span since the last read, in milliseconds and in order; then forget them.

        Waits for the last event of the device.
        """
        durations_ms: dict[str, list[float]] = {}
        for name, duration_ms in self._host_spans:
            durations_ms.setdefault(name, []).append(duration_ms)
        for name, start, end in self._event_spans:
            end.synchronize()
            durations_ms.setdefault(name, []).append(start.elapsed_time(end))
        self._host_spans.clear()
        self._event_spans.clear()
        return durations_ms
