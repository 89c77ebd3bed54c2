"""One process trains in a run folder at a time: two would write into each other's checkpoints and log."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

_log = logging.getLogger(__name__)

LOCK = ".train.lock"

# a run that was told to stop saves first
WAIT_HERE_S = 15.0
# a file server takes back the locks of a machine that died when its lease is over: 90 s by NFSv4's usual settings
WAIT_ELSEWHERE_S = 120.0


class RunLock:
    """The right to train in a folder, from `acquire` to the end of the `with` block or of the process.

    The lock is POSIX's (`fcntl.lockf`): it goes with its process, however that ends, data workers forked meanwhile do
    not keep it, and file servers know it.

    Args:
        folder: Of the run; made by `acquire`, and after the block gone again, with the parents it
            made, if nothing was written there.
        wait_here_s: How long a process of this machine may take to let go of it.
        wait_elsewhere_s: The same for another machine.
    """

    def __init__(
        self, folder: Path, *, wait_here_s: float = WAIT_HERE_S, wait_elsewhere_s: float = WAIT_ELSEWHERE_S
    ) -> None:
        self.folder = folder
        self._wait_here_s = wait_here_s
        self._wait_elsewhere_s = wait_elsewhere_s
        self._file: TextIO | None = None
        self._is_held = False
        # innermost first
        self._made: list[Path] = []

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if self._is_held and [path.name for path in self.folder.iterdir()] == [LOCK]:
            (self.folder / LOCK).unlink()
            for made in self._made:
                if any(made.iterdir()):
                    break
                made.rmdir()
        self._file.close()
        self._file, self._is_held = None, False

    def acquire(self) -> None:
        """Take the folder; waits for a process that holds it.

        A file system without locks is said in a warning, and the run goes on.

        Raises:
            ValueError: Another process still holds it when the time is over, or the folder is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output_dir={self.folder} is a file; give a folder")
        started = time.monotonic()
        said = False
        while not self._try_lock():
            process, machine = self._holder()
            wait_s = self._wait_here_s if machine == socket.gethostname() else self._wait_elsewhere_s
            if time.monotonic() - started >= wait_s:
                raise ValueError(
                    f"{self.folder} is being trained by process {process} on {machine}; wait until it has ended, end "
                    "it (it saves when it gets SIGTERM), or give another name="
                )
            if not said:
                _log.warning(
                    "%s is held by process %s on %s; waiting up to %.0f s for it to end",
                    *(self.folder, process, machine, wait_s),
                )
                said = True
            time.sleep(min(0.2, wait_s))

    def _try_lock(self) -> bool:
        """Whether the folder is ours, or cannot be anybody's."""
        if self._is_held:
            return True
        if self._file is None or self._is_gone():
            self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            _log.warning(
                "the file system of %s has no locks (%s); see to it yourself that nothing else trains there",
                *(self.folder, error.strerror),
            )
            return True
        if self._is_gone():
            return self._try_lock()
        self._is_held = True
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()} {socket.gethostname()}\n")
        self._file.flush()
        return True

    def _is_gone(self) -> bool:
        """Whether its last holder wrote nothing and took the file away: the lock would be on no folder."""
        assert self._file is not None
        try:
            return os.fstat(self._file.fileno()).st_nlink == 0
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return True

    def _holder(self) -> tuple[str, str]:
        """Process and machine that hold the folder, as they wrote them."""
        assert self._file is not None
        self._file.seek(0)
        process, _, machine = self._file.readline().strip().partition(" ")
        # taken, and not yet written
        return process or "?", machine or socket.gethostname()
