"""How long a run has trained: evaluations, start and pauses left out, all sittings together."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TrainingClock:
    """Runs while training does.

    Args:
        seconds: Trained in earlier sittings.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._before_s = seconds
        self._started_s: float | None = None
        self._asked_s = seconds

    @property
    def seconds(self) -> float:
        """Trained up to now."""
        running_s = 0.0 if self._started_s is None else time.perf_counter() - self._started_s
        return self._before_s + running_s

    @property
    def minutes(self) -> float:
        """Trained up to now."""
        return self.seconds / 60

    def passed(self, every_minutes: float) -> bool:
        """Whether a multiple of so many minutes has gone by since this was last asked, or since the clock was made."""
        asked_s, self._asked_s = self._asked_s, self.seconds
        return self._asked_s // (60 * every_minutes) > asked_s // (60 * every_minutes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of a block within `running`."""
        self._before_s, self._started_s = self.seconds, None
        try:
            yield
        finally:
            self._started_s = time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        self._started_s = time.perf_counter()
        try:
            yield
        finally:
            self._before_s, self._started_s = self.seconds, None
