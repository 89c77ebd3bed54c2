"""Says which rank hangs, and in what, long before a collective gives up."""

import faulthandler
import logging
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch.distributed import DistError, Store

_logger = logging.getLogger(__name__)

# how long the ranks that hang together get to say so
_ANSWER_S = 3.0


@dataclass(frozen=True)
class _Mark:
    """What the process began to do, and when."""

    step: int
    phase: str
    since_s: float


class Watchdog:
    """A thread that speaks up when the run has been in one phase for too long; it changes nothing.

    A rank that hangs keeps the others waiting in their next collective. So each rank posts what it is in, and the one
    that is furthest behind is named, as is one that does not answer at all. The stacks of this process's threads
    follow on stderr.

    Args:
        limit_s: Longer than this in one phase is a stall; None watches nothing.
        rank: Of this process.
        world_size: The number of ranks.
        store: Where the ranks post; None for one process.
    """

    def __init__(
        self, limit_s: float | None, *, rank: int = 0, world_size: int = 1, store: Store | None = None
    ) -> None:
        self._limit_s = limit_s
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._mark = _Mark(0, "start", time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, step: int, phase: str) -> None:
        """Note that the process now does `phase`, having finished `step` optimizer steps."""
        self._mark = _Mark(step, phase, time.monotonic())

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self.enter(0, "start")
            self._thread = threading.Thread(target=self._watch, args=(self._limit_s,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _ANSWER_S)

    def _watch(self, limit_s: float) -> None:
        reported: _Mark | None = None
        while not self._stop.wait(min(limit_s / 4, 5.0)):
            mark = self._mark
            if reported is not None and mark is not reported:
                # it went on after all: what it has posted is old
                reported = None
                self._forget_place()
            if mark is not reported and time.monotonic() - mark.since_s > limit_s:
                reported = mark
                self._report(mark)

    def _report(self, mark: _Mark) -> None:
        message = f"rank {self._rank} has been in {_describe(mark)} for {time.monotonic() - mark.since_s:.0f} s"
        if self._store is not None:
            try:
                message += f". {self._compare(mark, self._store)}"
            except DistError as error:
                # it went with the process that keeps it, which may be why the ranks hang
                message += (
                    f". The store in which ranks say where they are does not answer ({error}): look whether torchrun "
                    "and the machine of rank 0 are still there"
                )
        _logger.error("%s. What its threads do follows", message)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)

    def _forget_place(self) -> None:
        if self._store is not None:
            # a store that is gone holds nothing
            with suppress(DistError):
                self._store.delete_key(_key(self._rank))

    def _compare(self, mark: _Mark, store: Store) -> str:
        """What all ranks are in, and who keeps the others waiting."""
        store.set(_key(self._rank), f"{mark.step}|{mark.phase}")
        self._stop.wait(_ANSWER_S)
        places: dict[int, tuple[int, str]] = {}
        for rank in range(self._world_size):
            if store.check([_key(rank)]):
                step, _, phase = store.get(_key(rank)).decode().partition("|")
                places[rank] = (int(step), phase)
        lines = [f"rank {rank}: {_describe(_Mark(*place, 0.0))}" for rank, place in places.items()]
        silent = [rank for rank in range(self._world_size) if rank not in places]
        behind = [rank for rank, place in places.items() if _order(place) == min(map(_order, places.values()))]
        if silent:
            verdict = f"rank {', '.join(map(str, silent))} says nothing: it is at work, stopped or gone"
        elif len(behind) < len(places):
            verdict = f"rank {', '.join(map(str, behind))} keeps the others waiting"
        else:
            verdict = "all ranks are in the same place"
        return f"{verdict} ({'; '.join(lines)})"


def _describe(mark: _Mark) -> str:
    return f"{mark.phase} after step {mark.step}"


def _order(place: tuple[int, str]) -> tuple[int, bool]:
    """Earlier places first: the data of a step come before the step, in which ranks wait for each other."""
    step, phase = place
    return step, phase != "data"


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
