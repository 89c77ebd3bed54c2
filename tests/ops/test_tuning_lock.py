"""Processes that tune at once: none loses what another found."""

import errno
import fcntl
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.msda.tuning.file_lock import locked_file
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.store import TunedClass, read_tuning, tuning_path, update_tuning
from ops.msda.tuning.table import Device

H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
CHOICE = Choice("cuda", (LaunchShape("forward", 4),), LaunchShape("triton", 4, queries=32))
NUM_CLASSES = 25
# keeps one class after the other, of head sizes FIRST, FIRST + 1, ...; waits for a line before the first
TUNE = """
import sys
from pathlib import Path
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.store import TunedClass, update_tuning
from ops.msda.tuning.table import Device
path, first, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
choice = Choice("cuda", (LaunchShape("forward", 4),), LaunchShape("triton", 4, queries=32))
print("ready", flush=True)
input()
for head_dim in range(first, first + number):
    kind = ShapeClass("forward", 2, None, "encoder", head_dim, False)
    update_tuning(path, Device("NVIDIA H200", (9, 0), 132, 232_448), kind, TunedClass(kind, choice, 1.0, 2.0), {})
print("done", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tuning_path(H200, tmp_path)


@pytest.fixture
def tuners(path: Path, environment: dict[str, str]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two processes that have said they are ready, of NUM_CLASSES classes each."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TUNE, str(path), str(first), str(NUM_CLASSES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for first in (1, 1 + NUM_CLASSES)
    ]
    for tuner in started:
        assert tuner.stdout is not None
        assert tuner.stdout.readline() == "ready\n"
    yield started
    for tuner in started:
        tuner.kill()
        tuner.communicate()


def begin(tuner: "subprocess.Popen[str]") -> None:
    assert tuner.stdin is not None
    tuner.stdin.write("\n")
    tuner.stdin.flush()


def kept(path: Path) -> list[int]:
    return sorted(entry.kind.head_dim for entry in read_tuning(path, H200).classes)


def entry_of(head_dim: int) -> TunedClass:
    return TunedClass(ShapeClass("forward", 2, None, "encoder", head_dim, False), CHOICE, 1.0, 2.0)


def test_two_processes_lose_nothing_of_each_other(path: Path, tuners: list["subprocess.Popen[str]"]):
    for tuner in tuners:
        begin(tuner)
    for tuner in tuners:
        assert tuner.wait(timeout=60) == 0
    assert kept(path) == list(range(1, 2 * NUM_CLASSES + 1))
    assert {found.name for found in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


def test_a_process_waits_for_the_one_that_is_between_reading_and_writing(
    path: Path, tuners: list["subprocess.Popen[str]"]
):
    with locked_file(path):
        begin(tuners[0])
        with pytest.raises(subprocess.TimeoutExpired):
            tuners[0].wait(timeout=0.5)
        assert not path.exists()
    assert tuners[0].wait(timeout=60) == 0
    assert kept(path) == list(range(1, NUM_CLASSES + 1))


def test_a_killed_process_keeps_nobody_waiting(path: Path, environment: dict[str, str]):
    hold = "import sys, pathlib; from ops.msda.tuning.file_lock import locked_file\n"
    hold += "with locked_file(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
        update_tuning(path, H200, entry_of(7).kind, entry_of(7), {})
    assert kept(path) == [7]


def test_taking_a_class_out_of_no_file_makes_none(path: Path):
    update_tuning(path, H200, entry_of(7).kind, None, {})
    assert not path.parent.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_does_not_end_the_tuning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
):
    def refuse(*_: Any) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING, logger="ops"):
        update_tuning(path, H200, entry_of(7).kind, entry_of(7), {})
    assert "has no locks (no locks)" in caplog.text
    assert kept(path) == [7]


def test_other_errors_of_the_file_system_are_not_taken_for_a_lock(path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(OSError, match="broken disk"):
        update_tuning(path, H200, entry_of(7).kind, entry_of(7), {})
