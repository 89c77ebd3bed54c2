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

# another number after each start of a machine, and for all its containers; Linux has it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# a run that was told to stop saves first
WAIT_HERE_S = 15.0
# a file server takes back the locks of a machine that died when its lease is over: 90 s by NFSv4's usual settings
WAIT_ELSEWHERE_S = 120.0
# to make a folder that others take away again
_MOST_ATTEMPTS = 100


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
        self._numbers_last = True
        # innermost first
        self._made: list[Path] = []

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if self._is_held and self._is_ours():
            self._take_away()
        self._is_held = False
        file, self._file = self._file, None
        file.close()

    def _take_away(self) -> None:
        """Remove the folder if nothing was written there, and the parents that were made for it."""
        if [path.name for path in self.folder.iterdir()] != [LOCK]:
            return
        (self.folder / LOCK).unlink()
        for made in self._made:
            try:
                made.rmdir()
            except OSError:
                # another process began to use it, or has taken it away itself
                return

    def acquire(self) -> None:
        """Take the folder; waits for a process that holds it.

        A file system without locks is said in a warning, and the run goes on.

        Raises:
            ValueError: Another process still holds it when the time is over, or a file or a link to nothing is in the
                way.
            OSError: Nothing can be written there.
        """
        for path in (self.folder, *self.folder.parents):
            if path.is_symlink() and not path.exists():
                raise ValueError(
                    f"output_dir={self.folder}: {path} is a link to nothing; make its target, or remove it"
                )
            if path.exists() and not path.is_dir():
                raise ValueError(f"output_dir={self.folder}: {path} is a file; give a folder")
        started = time.monotonic()
        said = False
        while not self._try_lock_or_explain():
            process, machine, is_here = self._holder()
            wait_s = self._wait_here_s if is_here else self._wait_elsewhere_s
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

    def require(self) -> None:
        """Return if the folder is still the one that `acquire` took; for a process that is about to write there.

        Raises:
            OSError: It was removed or moved away, and what is at its place may be another run's.
        """
        if self._is_held and not self._is_ours():
            raise OSError(
                errno.ESTALE,
                f"{self.folder}, or its {LOCK}, was removed or moved away while this run trained in it. It ends and "
                "writes nothing more; see to it that a run has ended before its folder is touched",
            )

    def _try_lock_or_explain(self) -> bool:
        try:
            return self._try_lock()
        except OSError as error:
            raise OSError(
                error.errno,
                f"output_dir={self.folder} cannot be used: {error.strerror}; make room there, or give a folder that "
                "you may write to",
            ) from error

    def _try_lock(self) -> bool:
        """Whether the folder is ours, or cannot be anybody's."""
        if self._is_held:
            return True
        if self._file is None or not self._is_ours():
            self._open()
        assert self._file is not None
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
        if not self._is_ours():
            return self._try_lock()
        self._is_held = True
        self._file.seek(0)
        self._file.truncate()
        # at once: a text file that could not write would try again when it is closed
        os.write(self._file.fileno(), f"{os.getpid()} {socket.gethostname()} {_boot_id()}\n".encode())
        return True

    def _open(self) -> None:
        for attempt in range(_MOST_ATTEMPTS):
            try:
                self._open_once()
                return
            except FileNotFoundError:
                # a holder without results takes the folder away at this moment
                if attempt == _MOST_ATTEMPTS - 1:
                    raise
                time.sleep(0.001)

    def _open_once(self) -> None:
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / LOCK).open("a+", encoding="utf-8")
        # some file systems number a file anew each time it is looked for
        self._numbers_last = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.folder / LOCK))

    def _is_ours(self) -> bool:
        """Whether the open file is the one in the folder: else the lock is on a folder that is gone."""
        assert self._file is not None
        try:
            own, found = os.fstat(self._file.fileno()), os.stat(self.folder / LOCK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            return False
        return own.st_nlink > 0 and (os.path.samestat(own, found) or not self._numbers_last)

    def _holder(self) -> tuple[str, str, bool]:
        """Process and machine that hold the folder, as they wrote them, and whether the machine is this one."""
        assert self._file is not None
        self._file.seek(0)
        words = self._file.readline().split()
        own_machine, own_boot = socket.gethostname(), _boot_id()
        # taken, and not yet written; or written where there is no boot id
        process, machine, boot = words + ["?", own_machine, own_boot][len(words) :]
        # containers of different machines may have one name
        is_here = machine == own_machine and (boot == own_boot or not own_boot)
        return process, machine, is_here


def _boot_id() -> str:
    """Of this start of this machine; empty where the system does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
