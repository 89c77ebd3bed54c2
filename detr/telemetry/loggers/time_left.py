"""How long a run still takes, and at which step it will end."""

import math
import time
from collections import deque
from dataclasses import dataclass

_NUM_POINTS = 20


@dataclass(frozen=True)
class Evaluations:
    """When a run evaluates, beside its end, and how long that took before this process.

    Attributes:
        every_steps: Steps from one to the next, as `eval_every` epochs have. None: not by steps.
        origin: The step that `every_steps` are counted from; not 0 where a run was resumed with other steps an epoch.
        every_minutes: Of training, from one to the next. None: not by the clock.
        seconds: What one took before this process. None: not known.
    """

    every_steps: int | None = None
    origin: int = 0
    every_minutes: float | None = None
    seconds: float | None = None


class TimeLeft:
    """Learns from each log of a run how fast it is.

    Counted is training at the speed of the last logs, to the last step or to `max_minutes`, whichever comes first; and,
    once it is known what an evaluation takes with the saving around it, those that are due until then and the one that
    every run ends with, each as long as the last. The start of a run is not counted.

    Args:
        num_steps: The step at which the schedule ends.
        first_step: Done before this process, after a resume.
        first_minutes: Trained before this process.
        max_minutes: Of training, after which the run ends sooner than by its steps. None: the steps alone.
        evaluations: When they are due. None: at the end alone.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        first_minutes: float = 0.0,
        max_minutes: float | None = None,
        evaluations: Evaluations | None = None,
    ) -> None:
        self._num_steps = num_steps
        self._max_minutes = max_minutes
        self._minutes = first_minutes
        self._start_s = self._logged_s = time.monotonic()
        self._paused_s = 0.0
        self._evaluations = evaluations or Evaluations()
        self._evaluation_s = self._evaluations.seconds
        # up to where what was due has been evaluated
        self._evaluated_step, self._evaluated_minutes = first_step, first_minutes
        self._has_minutes = False
        # (seconds of training in this process, step)
        self._points = deque([(0.0, first_step)], maxlen=_NUM_POINTS)

    def log(self, step: int, *, minutes: float | None, is_evaluation: bool) -> None:
        """A log that is made now.

        Args:
            step: Done.
            minutes: Trained in all, pauses left out; None where a log does not say, and the time since the last one
                counts as training.
            is_evaluation: Whether one has just ended.
        """
        now_s = time.monotonic()
        # one that is due at this very log is made after it
        self._evaluated_step = step if is_evaluation else max(self._evaluated_step, step - 1)
        if minutes is not None:
            pause_s = max(0.0, now_s - self._logged_s - 60 * (minutes - self._minutes))
            self._has_minutes = True
            self._evaluated_minutes = minutes if is_evaluation else self._minutes
            self._minutes, self._logged_s = minutes, now_s
            self._paused_s += pause_s
            if is_evaluation:
                self._evaluation_s = pause_s
        if step > self._points[-1][1]:
            self._points.append((now_s - self._start_s - self._paused_s, step))

    @property
    def training_s(self) -> float | None:
        """Seconds of training that are left, 0 at the end; None before the first step of this process."""
        return None if self._steps_s is None else min(self._steps_s, self._minutes_s)

    @property
    def seconds(self) -> float | None:
        """Seconds that are left, with the evaluations if `knows_evaluations`; 0 when training is over."""
        training_s = self.training_s
        if not training_s or self._evaluation_s is None:
            return training_s
        return training_s + self._num_evaluations(training_s) * self._evaluation_s

    @property
    def knows_evaluations(self) -> bool:
        """Whether evaluations are counted: it is known how long one takes, or nothing tells them from training."""
        return self._evaluation_s is not None or not self._has_minutes

    @property
    def ends_by_time(self) -> bool:
        """Whether `max_minutes` come before the last step, at this speed."""
        return self._steps_s is not None and self._minutes_s < self._steps_s

    @property
    def last_step(self) -> int | None:
        """Where the run will end, a guess if `ends_by_time`; None as long as nothing is known of the speed."""
        if self._steps_s is None:
            return self._num_steps if self._max_minutes is None else None
        step = self._points[-1][1]
        if not self.ends_by_time:
            return self._num_steps
        return step + round(self._minutes_s / self._steps_s * (self._num_steps - step))

    def _num_evaluations(self, training_s: float) -> int:
        """Until the end in so many seconds of training, at which there is one whatever is due."""
        every_steps, every_minutes = self._evaluations.every_steps, self._evaluations.every_minutes
        last_step = self.last_step
        assert last_step is not None
        number = 1
        if every_steps is not None:
            first, last = (step - self._evaluations.origin for step in (self._evaluated_step, last_step - 1))
            number += last // every_steps - first // every_steps
        if every_minutes is not None:
            last_minutes = self._minutes + training_s / 60
            number += max(0, math.ceil(last_minutes / every_minutes) - 1 - int(self._evaluated_minutes / every_minutes))
        return number

    @property
    def _steps_s(self) -> float | None:
        """Of training to the last step of the schedule."""
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        if last == first:
            return None
        return (last_s - first_s) / (last - first) * max(0, self._num_steps - last)

    @property
    def _minutes_s(self) -> float:
        """Of training to `max_minutes`."""
        return float("inf") if self._max_minutes is None else max(0.0, 60 * (self._max_minutes - self._minutes))
