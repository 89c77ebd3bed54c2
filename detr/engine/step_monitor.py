"""Watches the numbers of every step: steps that are not finite are explained, spikes are said."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from detr.engine.batch_dump import dump_window
from detr.engine.diagnosis import first_nonfinite
from detr.engine.interval import step_values
from detr.engine.random_state import TorchStreams, torch_streams
from detr.engine.state import TrainState
from detr.engine.step import StepResult
from detr.rank_logging import OF_THIS_RANK
from detr.structures import Batch
from detr.telemetry.host_copy import HostCopy

_logger = logging.getLogger(__name__)

NonFinitePolicy = Literal["skip", "stop"]

# explained and dumped in one process; after that only counted
MAX_REPORTS = 3

# a value this many times its usual size is a spike; losses vary less from batch to batch than gradients
SPIKE_FACTORS = {"train/loss": 5.0, "train/grad_norm": 20.0}
SPIKE_WINDOW = 100
SPIKE_MIN_STEPS = 20


@dataclass(frozen=True)
class _Step:
    number: int
    window: Sequence[Batch]
    random_streams: TorchStreams
    names: tuple[str, ...]
    values: HostCopy


class StepMonitor:
    """Looks at each step's numbers as soon as that costs no waiting: on a GPU one step later.

    Where the matcher solves on the host, it has then waited for this step, so its numbers are there already. Where it
    solves on the device, the host waits for them here, with the whole next step given to the device.

    Args:
        state: Of the run.
        folder: Batches of broken steps are written to its subfolder `nonfinite`.
        rank: Of this process. A rank writes its batch only if the fault is in its own images.
        policy: "skip": a step that is not finite changes nothing and the run goes on; "stop": it ends.
        max_in_row: So many such steps in a row end the run whatever the policy.
    """

    def __init__(self, state: TrainState, folder: Path, *, rank: int, policy: NonFinitePolicy, max_in_row: int) -> None:
        self._state = state
        self._folder = folder / "nonfinite"
        self._rank = rank
        self._policy = policy
        self._max_in_row = max_in_row
        self._random_streams = torch_streams(state.device)
        self._waiting: _Step | None = None
        self._num_in_row = 0
        self._num_reports = 0
        self._usual: dict[str, deque[float]] = {name: deque(maxlen=SPIKE_WINDOW) for name in SPIKE_FACTORS}
        self._quiet_until: dict[str, int] = dict.fromkeys(SPIKE_FACTORS, 0)

    def before_step(self) -> None:
        """Note the random streams that the step will draw from."""
        self._random_streams = torch_streams(self._state.device)

    def after_step(self, number: int, window: Sequence[Batch], result: StepResult) -> None:
        """Look at the step before this one, or on the CPU at this one.

        Raises:
            FloatingPointError: The policy says stop, on every rank alike.
        """
        values = step_values(result)
        copy = HostCopy(torch.stack([value.float() for value in values.values()]))
        step: _Step | None = _Step(number, window, self._random_streams, tuple(values), copy)
        if self._state.device.type == "cuda":
            step, self._waiting = self._waiting, step
        if step is not None:
            self._examine(step)

    def finish(self) -> None:
        """Look at the last step. Waits for the device."""
        if self._waiting is not None:
            step, self._waiting = self._waiting, None
            self._examine(step)

    def _examine(self, step: _Step) -> None:
        values = dict(zip(step.names, step.values.read().tolist(), strict=True))
        if values["train/skipped"] == 0:
            self._num_in_row = 0
            self._warn_of_spikes(step, values)
            return
        self._num_in_row += 1
        bad_terms = [name.removeprefix("train/") for name, value in values.items() if not _is_finite(value)]
        # with fp16 gradients overflow now and then, and the scaler answers by itself
        is_routine = self._state.scaler.is_enabled() and bad_terms == ["grad_norm"]
        report = None
        if not is_routine and self._num_reports < MAX_REPORTS:
            self._num_reports += 1
            report = self._report(step, bad_terms)
            _logger.warning("%s", report, extra=OF_THIS_RANK)
        if self._policy == "stop" and not is_routine:
            raise FloatingPointError(
                f"{report or self._summary(step, bad_terms)}\ntrainer.nonfinite=stop: the run ends here. Start "
                "it again with trainer.nonfinite=skip to leave the batch out"
            )
        if self._num_in_row >= self._max_in_row:
            raise FloatingPointError(
                f"{self._num_in_row} steps in a row were not finite (trainer.max_nonfinite); nothing was learned in "
                "them. Lower optimizer.lr, or use precision=fp32 or bf16"
            )

    def _report(self, step: _Step, bad_terms: list[str]) -> str:
        text = self._summary(step, bad_terms)
        try:
            cause = first_nonfinite(self._state, step.window, step.random_streams)
        except torch.OutOfMemoryError:
            return f"{text}. There is no memory to train on it again and look for the cause"
        if cause is None:
            text += ". Trained on again, every tensor of this rank is finite"
        else:
            text += f". The first tensor that is not finite is {cause}"
        if cause is not None or self._rank == 0:
            path = self._folder / f"step_{step.number:08d}_rank{self._rank}.pt"
            dump_window(step.window, path, step=step.number, report=text)
            text += f"; the batch is in {path}"
        return text

    def _summary(self, step: _Step, bad_terms: list[str]) -> str:
        return (
            f"step {step.number} is not finite on rank {self._rank} ({', '.join(bad_terms)}) and was skipped: the "
            f"weights are as before. Images {image_ids(step.window)}"
        )

    def _warn_of_spikes(self, step: _Step, values: dict[str, float]) -> None:
        for name, factor in SPIKE_FACTORS.items():
            usual, value = self._usual[name], values[name]
            if len(usual) >= SPIKE_MIN_STEPS and step.number >= self._quiet_until[name]:
                median = sorted(usual)[len(usual) // 2]
                if value > factor * median:
                    self._quiet_until[name] = step.number + SPIKE_WINDOW
                    _logger.warning(
                        "step %d: %s is %.4g, usually %.4g; images %s of rank %d. If this goes on, lower optimizer.lr",
                        step.number,
                        name,
                        value,
                        median,
                        image_ids(step.window),
                        self._rank,
                        extra=OF_THIS_RANK,
                    )
            usual.append(value)


def image_ids(window: Sequence[Batch]) -> list[int]:
    """The ids of the images of a window, in its order."""
    return [target.image_id for batch in window for target in batch.targets]


def _is_finite(value: float) -> bool:
    return value - value == 0
