"""One process at a time changes a file of tuned launch shapes: two could each write what the other has not seen."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("ops")


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold `path` against other processes, by a lock on a file beside it; waits for the one that holds it.

    The lock is POSIX's: it goes with its process, however that ends, and file servers know it. It holds off processes,
    not threads. A file system without locks is said in a warning, and the block runs all the same.

    Args:
        path: Need not be there; its folder is made.

    Raises:
        OSError: The folder cannot be written.
    """
    # tables are read on systems that have no fcntl
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    # it stays: who takes it away could leave two processes with a lock on different files of one name
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning(
                "the file system of %s has no locks (%s); see to it yourself that nothing else tunes there",
                *(path.parent, error.strerror),
            )
        yield
