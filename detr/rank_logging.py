"""What each of several ranks says in the log: what all of them meet alike is said once."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

OF_THIS_RANK: Mapping[str, bool] = MappingProxyType({"is_of_this_rank": True})
"""The `extra` of a log call about what one rank may meet alone: its batch, the memory of its device."""


def log_as_rank(handlers: Iterable[logging.Handler], *, rank: int, local_rank: int) -> None:
    """Let a rank of several say what rank 0 does not say for it.

    `detr` and `tools` read the same files and build the same model on every rank: above 0 only errors pass, and what
    is marked `OF_THIS_RANK`, which begins with the rank's number (on rank 0 too). `ops` speaks of the machine, such as
    its compiler and its tuned launch shapes: the first rank of each one says warnings. Other libraries say what they
    always do.

    Args:
        handlers: That take all records of the process, those of the root logger.
        rank: Index of this process in the run.
        local_rank: Index of this process on its machine.
    """

    def passes(record: logging.LogRecord) -> bool:
        if rank == 0 or record.levelno >= logging.ERROR or _is_of_one_rank(record):
            return True
        package = record.name.partition(".")[0]
        if package == "ops":
            return local_rank == 0 and record.levelno >= logging.WARNING
        return package not in ("detr", "tools")

    for handler in handlers:
        handler.addFilter(passes)
        handler.setFormatter(_RankFormatter(handler.formatter or logging.Formatter(), rank))


class _RankFormatter(logging.Formatter):
    """Names the rank in what concerns it alone.

    Args:
        plain: Makes the text.
        rank: Index of this process in the run.
    """

    def __init__(self, plain: logging.Formatter, rank: int) -> None:
        super().__init__()
        self._plain = plain
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = self._plain.format(record)
        return f"rank {self._rank}: {text}" if _is_of_one_rank(record) else text


def _is_of_one_rank(record: logging.LogRecord) -> bool:
    return bool(getattr(record, "is_of_this_rank", False))
