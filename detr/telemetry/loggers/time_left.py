"""How long a run still takes, and at which step it will end."""

import time
from collections import deque

_NUM_POINTS = 20


class TimeLeft:
    """Learns from each log of a run how fast it is.

    Counted is training at the speed of the last logs, to the last step or to `max_minutes`, whichever comes first; and,
    once one has been seen, evaluations with whatever else stops the clock of training: their share of the time from one
    to the next, and at least as long as the last took, since a run ends with one. The start of a run is not counted.

    Args:
        num_steps: Of the whole schedule.
        first_step: Done before this process, after a resume.
        first_minutes: Trained before this process.
        max_minutes: Of training, after which the run ends sooner than by its steps. None: the steps alone.
    """

    def __init__(
        self, num_steps: int, *, first_step: int = 0, first_minutes: float = 0.0, max_minutes: float | None = None
    ) -> None:
        self._num_steps = num_steps
        self._max_minutes = max_minutes
        self._minutes = first_minutes
        self._start_s = self._logged_s = time.monotonic()
        self._paused_s = 0.0
        self._evaluation_s: float | None = None
        # seconds of pauses a second of training
        self._share = 0.0
        # (seconds of training, of pauses) where the share is measured from; after a resume the first evaluation
        self._share_from: tuple[float, float] | None = (0.0, 0.0) if first_step == 0 else None
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
        if minutes is not None:
            pause_s = max(0.0, now_s - self._logged_s - 60 * (minutes - self._minutes))
            self._has_minutes = True
            self._minutes, self._logged_s = minutes, now_s
            self._paused_s += pause_s
            if is_evaluation:
                self._evaluation_s = pause_s
                self._learn_share(now_s - self._start_s - self._paused_s)
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
        return training_s + max(self._evaluation_s, self._share * training_s)

    @property
    def knows_evaluations(self) -> bool:
        """Whether evaluations are counted: one has been seen, or nothing tells them from training."""
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

    def _learn_share(self, trained_s: float) -> None:
        if self._share_from is None:
            self._share_from = (trained_s, self._paused_s)
        from_s, paused_s = self._share_from
        if trained_s > from_s:
            self._share = (self._paused_s - paused_s) / (trained_s - from_s)

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
