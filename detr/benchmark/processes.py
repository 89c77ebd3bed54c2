"""What runs of other processes need: they end with the one that started them, and a failure has one line."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# what torchrun puts before the lines of a rank, and how a stack trace ends
_RANK = re.compile(r"^\[rank\d+\]:")
# what a tool puts after its error
_HINT = "(HYDRA_FULL_ERROR=1"
_EXCEPTION = re.compile(r"^[\w.]+(Error|Exception|Unavailable)\b")

# torchrun kills ranks that have not ended after 30 s
_PATIENCE_S = 45.0


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, through its clean-up: a row must not stay on the GPU without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def end_session(process: "subprocess.Popen[str]") -> None:
    """End a process that leads a session of its own, and what it has started.

    It is asked first: torchrun gives each rank a session too, which ends with it only if it can see to that. What is
    then left of its own session, such as data workers, is killed.
    """
    process.terminate()
    try:
        # not until its output ends, which data workers hold open
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure_reason(said: str) -> str:
    """The line of a failed process's error output that says why."""
    lines = [_RANK.sub("", line).strip() for line in said.splitlines()]
    start = next((index for index, line in enumerate(lines) if line.startswith("error:")), None)
    if start is not None:
        # what the tool says to its user: all its lines, as one
        end = next((index for index in range(start, len(lines)) if lines[index].startswith(_HINT)), start + 1)
        return " ".join(filter(None, lines[start:end])).removeprefix("error: ")
    # under torchrun the launcher reports after the rank that failed
    raised = [line for line in lines if _EXCEPTION.match(line) and "ChildFailedError" not in line]
    return raised[-1] if raised else next((line for line in reversed(lines) if line), "no message")
