"""Stopping when the scheduler asks: a signal becomes a checkpoint and an exit code that means "start me again"."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

# EX_TEMPFAIL of sysexits.h: nothing is wrong, try again later
REQUEUE_EXIT_CODE = 75

# torchrun hands on the signal that a scheduler sends to every process anyway: one request, not two
_SAME_REQUEST_S = 10.0


class Preempted(Exception):
    """A run ended early because it was asked to; its checkpoint is on the disk."""


class StopRequest:
    """Listens for SIGTERM and SIGUSR1 while entered; `requested` then says that one came.

    A signal changes nothing by itself. A second one, 10 seconds later or more, ends the process at once, as it
    would without this. Outside the main thread, where Python takes no signals, nothing is listened to.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = False
        self._first_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # nothing is printed here: the signal may have interrupted a print
        now_s = time.monotonic()
        if not self.requested:
            self.requested = True
            self._first_s = now_s
        elif now_s - self._first_s > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
