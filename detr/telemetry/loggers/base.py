"""What a logger is, and several as one."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Cell = str | float | bool | None
"""A value of a table; None where there is none. The cells of a column are of one kind."""


class Logger(Protocol):
    """Takes the numbers of a run. Loggers open files and connections at their first `log`, not before.

    Names are `group/name` (train/loss, val/AP) with the unit as suffix where there is one (images_per_s,
    gpu_memory_gib, step_ms).
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` after optimiser step `step`. One step may be logged several times."""

    def close(self) -> None:
        """Write out what is pending; the logger is not used again."""


@runtime_checkable
class MediaLogger(Logger, Protocol):
    """A logger that takes pictures and tables too. They are for evaluations and ends of runs, not for steps."""

    def log_images(self, step: int, name: str, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Record pictures under one name.

        Args:
            step: Optimiser step.
            name: As of a value: `group/name`.
            images: Caption -> (h, w, 3) uint8 RGB; sizes may differ. The same captions at every step let a reader
                see how a picture changes.
        """

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table.

        Args:
            step: Optimiser step.
            name: As of a value: `group/name`.
            columns: Their names.
            rows: A cell a column each.
        """


class CompositeLogger:
    """Hands everything to several loggers, in order; pictures and tables to those that take them.

    Args:
        loggers: Owned by this logger from now on.
        enabled: False drops everything: pass `detr.distributed.is_main()`, so that only rank 0 logs.
    """

    def __init__(self, loggers: Sequence[Logger], *, enabled: bool = True) -> None:
        self._loggers = tuple(loggers) if enabled else ()
        self._media_loggers = tuple(logger for logger in self._loggers if isinstance(logger, MediaLogger))

    @property
    def takes_media(self) -> bool:
        """Whether pictures and tables go anywhere; nobody else need make them."""
        return bool(self._media_loggers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, values)

    def log_images(self, step: int, name: str, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """See `MediaLogger`.

        Raises:
            ValueError: A picture is not (h, w, 3) uint8.
        """
        for caption, image in images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(
                    f"{name}, {caption}: pictures are (h, w, 3) uint8 RGB; got {image.dtype} of shape {image.shape}"
                )
        for logger in self._media_loggers:
            logger.log_images(step, name, images)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `MediaLogger`.

        Raises:
            ValueError: A row has another number of cells than there are columns.
        """
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(f"{name}: row {number} has {len(row)} cells for {len(columns)} columns")
        for logger in self._media_loggers:
            logger.log_table(step, name, columns, rows)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
