"""One comparison at a time in a folder: two would train the same runs into each other's files."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[int]:
    """Hold `folder`, which is there; yields the descriptor that processes must inherit to hold it as well.

    The lock is the kernel's: it goes when the last process that has it ends, however it ends. Runs that inherit it
    keep the folder when the comparison alone was killed.

    Raises:
        ValueError: Another comparison, or a run that one left behind, holds it.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{folder} is in use by another comparison, or by runs that a killed one left; wait until they have "
                "ended, end them (each has output_dir= of that folder in its command line, and saves when it gets "
                "SIGTERM), or give another output_dir="
            ) from error
        yield file.fileno()
