"""A profile of a few training steps, written into the run folder."""

import logging
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from detr.telemetry.kernel_times import kernel_table, kernel_times, profiler_activities

_logger = logging.getLogger(__name__)

TRACE = "profile_trace.json.gz"
KERNELS = "profile_kernels.md"


class StepProfiler:
    """Records steps after a warm-up, then writes a Chrome trace and a table of the longest kernels, once.

    The trace opens in chrome://tracing or ui.perfetto.dev. On the CPU the table holds operators.

    Args:
        device: What the steps run on.
        folder: Exists when the profile is written.
        num_steps: Steps to record.
        num_warmup: Steps before them: compilation, autotuning, the allocator; the last of them starts the profiler.
    """

    def __init__(self, device: torch.device, folder: Path, *, num_steps: int, num_warmup: int = 10) -> None:
        self._device = device
        self._folder = folder
        self._num_steps = num_steps
        self._num_warmup = num_warmup
        self._num_done = 0
        self._profiler = profile(
            activities=profiler_activities(device),
            schedule=schedule(wait=num_warmup - 1, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._write,
        )

    def start(self) -> None:
        """Count from here."""
        self._profiler.start()

    def step(self) -> None:
        """A training step has ended."""
        if self._num_done < self._num_warmup + self._num_steps:
            self._num_done += 1
            self._profiler.step()

    def close(self) -> None:
        """End; a run shorter than asked for leaves the steps it had, or a warning."""
        if self._num_done <= self._num_warmup:
            _logger.warning(
                "trainer.profile_steps: nothing was profiled, since the run had %d steps and the first %d are warm-up",
                self._num_done,
                self._num_warmup,
            )
        self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        num_steps = max(1, min(self._num_done - self._num_warmup, self._num_steps))
        profiler.export_chrome_trace(str(self._folder / TRACE))
        table = kernel_table(kernel_times(profiler, self._device), num_steps=num_steps)
        (self._folder / KERNELS).write_text(
            f"# {num_steps} training steps after {self._num_warmup}, on {self._device}\n\n{table}", encoding="utf-8"
        )
        _logger.info("profile of %d steps: %s and %s", num_steps, self._folder / KERNELS, self._folder / TRACE)
