"""What a logger is, and several as one."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Logger(Protocol):
    """Takes the numbers of a run. Loggers open files and connections at their first `log`, not before.

    Names are `group/name` (train/loss, val/AP) with the unit as suffix where there is one (images_per_s,
    gpu_memory_gib, step_ms).
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` after optimiser step `step`. One step may be logged several times."""

    def close(self) -> None:
        """Write out what is pending; the logger is not used again."""


class CompositeLogger:
    """Hands everything to several loggers, in order.

    Args:
        loggers: Owned by this logger from now on.
        enabled: False drops everything: pass `detr.distributed.is_main()`, so that only rank 0 logs.
    """

    def __init__(self, loggers: Sequence[Logger], *, enabled: bool = True) -> None:
        self._loggers = tuple(loggers) if enabled else ()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, values)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
