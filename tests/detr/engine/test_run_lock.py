import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from detr.engine.checkpoint import Checkpoint
from detr.engine.checkpoint_writer import CheckpointWriter
from detr.engine.run_folder import RunFolder
from detr.engine.run_lock import BOOT_ID, LOCK, RunLock

HOLD = """
import os, pathlib, sys, time
from detr.engine.run_lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child == 0:
    # as a data worker: outlives its parent for a while, with all its files
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
input()
os.kill(child, 9)
"""

Hold = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts a process that trains in the folder `run` and has a data worker."""
    holders: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stdout = holders[-1].stdout
        assert stdout is not None
        assert int(stdout.readline()) > 0
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()
        holder.wait()


def test_a_second_process_is_refused_and_told_who_trains(hold: Hold, tmp_path: Path):
    holder = hold()
    lock = RunLock(tmp_path / "run", wait_here_s=0.1)
    with lock, pytest.raises(ValueError, match="is being trained by process") as error:
        lock.acquire()
    assert f"process {holder.pid} on {socket.gethostname()}; wait" in str(error.value)
    assert "another name=" in str(error.value)


def test_a_killed_process_lets_go_though_its_worker_lives(hold: Hold, tmp_path: Path):
    holder = hold()
    holder.kill()
    holder.wait()
    with RunLock(tmp_path / "run", wait_here_s=0.1) as lock:
        lock.acquire()


def test_a_run_that_is_about_to_end_is_waited_for(hold: Hold, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    holder = hold()
    stdin = holder.stdin
    assert stdin is not None
    # ends while we wait: what it takes to end is a line
    stdin.write("\n")
    stdin.flush()
    with RunLock(tmp_path / "run", wait_here_s=20) as lock:
        lock.acquire()
    assert caplog.text.count("waiting up to 20 s") <= 1


def test_the_waiting_is_said_once(hold: Hold, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    hold()
    with RunLock(tmp_path / "run", wait_here_s=1) as lock, pytest.raises(ValueError, match="is being trained"):
        lock.acquire()
    assert caplog.text.count("waiting up to 1 s") == 1


def test_another_machine_gets_the_time_a_file_server_needs(hold: Hold, tmp_path: Path):
    hold()
    (tmp_path / "run" / LOCK).write_text("12 node7\n")
    started = time.monotonic()
    lock = RunLock(tmp_path / "run", wait_here_s=0, wait_elsewhere_s=0.7)
    with lock, pytest.raises(ValueError, match="by process 12 on node7"):
        lock.acquire()
    assert time.monotonic() - started >= 0.7


@pytest.mark.parametrize(
    ("written", "own_boot", "is_here"),
    [
        ("12 {host} boot-a", "boot-a", True),
        ("12 {host} boot-b", "boot-a", False),  # a container of the same name on another machine, or before a restart
        ("12 node7 boot-a", "boot-a", False),
        ("12 {host}", "boot-a", True),  # the holder's system has no boot id
        ("12 {host} boot-b", None, True),  # this one has none
        ("", "boot-a", True),  # taken, and not yet written
    ],
)
def test_what_counts_as_this_machine(
    hold: Hold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: str,
    own_boot: str | None,
    is_here: bool,
):
    hold()
    (tmp_path / "run" / LOCK).write_text(written.format(host=socket.gethostname()) + "\n")
    if own_boot is not None:
        (tmp_path / "boot_id").write_text(own_boot + "\n")
    monkeypatch.setattr("detr.engine.run_lock.BOOT_ID", tmp_path / "boot_id")
    lock = RunLock(tmp_path / "run", wait_here_s=0, wait_elsewhere_s=0.6)
    with lock, pytest.raises(ValueError, match=r"is being trained by process (12|[?]) on [^ ]+; wait until"):
        lock.acquire()
    assert ("waiting up to 1 s" in caplog.text) == (not is_here)


def test_the_holder_writes_the_boot_id(hold: Hold, tmp_path: Path):
    holder = hold()
    words = (tmp_path / "run" / LOCK).read_text().split()
    boot = BOOT_ID.read_text().split() if BOOT_ID.exists() else []
    assert words == [str(holder.pid), socket.gethostname(), *boot]


def test_the_end_of_the_block_lets_go(hold: Hold, tmp_path: Path):
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        lock.acquire()
    hold()


@pytest.mark.parametrize("kept", ["", "a", "a/b", "a/b/run"])
def test_folders_without_a_run_are_taken_away_again(tmp_path: Path, kept: str):
    """Those that were there before stay."""
    (tmp_path / kept).mkdir(parents=True, exist_ok=True)
    before = list(tmp_path.rglob("*"))
    with RunLock(tmp_path / "a" / "b" / "run") as lock:
        lock.acquire()
        assert (tmp_path / "a" / "b" / "run").is_dir()
    assert list(tmp_path.rglob("*")) == before


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path):
    with RunLock(tmp_path / "a" / "run") as lock:
        lock.acquire()
        (tmp_path / "a" / "other").mkdir()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["other"]


def test_a_folder_with_a_run_stays(tmp_path: Path):
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        (tmp_path / "run" / "last.pt").write_text("")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"last.pt", LOCK}


def test_the_lock_that_is_waited_for_is_of_the_folder_that_is_there(hold: Hold, tmp_path: Path):
    """The holder ends without a run and takes the folder away, while another process waits."""
    holder = hold()
    with RunLock(tmp_path / "run", wait_here_s=0.1) as waiting:
        with pytest.raises(ValueError, match="is being trained"):
            waiting.acquire()
        shutil.rmtree(tmp_path / "run")
        holder.kill()
        holder.wait()
        waiting.acquire()
        assert (tmp_path / "run" / LOCK).read_text().split()[:2] == [str(os.getpid()), socket.gethostname()]


def test_a_folder_that_goes_between_opening_and_locking_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As by a holder without results that ends at this moment: the lock got would be of a file that is gone."""
    lockf, taken_away = fcntl.lockf, []

    def late(file: TextIO, operation: int) -> None:
        if not taken_away:
            shutil.rmtree(tmp_path / "run")
            taken_away.append(True)
        lockf(file, operation)

    monkeypatch.setattr(fcntl, "lockf", late)
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        assert taken_away
        lock.require()


def test_nothing_is_held_before_acquire(hold: Hold, tmp_path: Path):
    with RunLock(tmp_path / "run"):
        hold()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
):
    def refuse(*_: Any) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path / "run") as lock:
        lock.acquire()
    assert "has no locks" in caplog.text


def test_other_errors_of_the_file_system_are_not_taken_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock(tmp_path / "run") as lock, pytest.raises(OSError, match="cannot be used: broken disk; make room"):
        lock.acquire()


@pytest.mark.parametrize(
    ("output_dir", "message"),
    [
        ("file", "file is a file; give a folder"),
        ("file/a/run", "file is a file; give a folder"),
        ("link", "link is a link to nothing; make its target"),
        ("link/run", "link is a link to nothing; make its target"),
        ("/proc/run", "cannot be used: No such file or directory; make room there, or give a folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path, output_dir: str, message: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "x")
    with RunLock(tmp_path / output_dir) as lock, pytest.raises((ValueError, OSError), match=message) as error:
        lock.acquire()
    assert output_dir in str(error.value)


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once, and not again when the file is closed."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    lock = RunLock(tmp_path / "run")
    with lock, pytest.raises(OSError, match="run cannot be used: No space left on device; make room there"):
        lock.acquire()
    assert not (tmp_path / "run").exists()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_and_make_again(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / LOCK).write_text("7 node7\n")


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("old"))


def put_a_file_there(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("change", [remove, remove_and_make_again, move_away, put_a_file_there])
def test_a_run_whose_folder_goes_away_writes_nothing_more(
    tmp_path: Path, checkpoint: Checkpoint, change: Callable[[Path], None]
):
    """What is in its place belongs to somebody else."""
    folder = tmp_path / "run"
    with RunLock(folder) as lock:
        lock.acquire()
        lock.require()
        change(folder)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match="was removed or moved away while this run trained"):
            lock.require()
        writer = CheckpointWriter(RunFolder(folder, None), keep_last=2, lock=lock)
        with pytest.raises(OSError, match="was removed or moved away"):
            writer.save(checkpoint, is_best=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_that_numbers_files_anew_is_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        lock.require()
        (tmp_path / "run" / LOCK).unlink()
        with pytest.raises(OSError, match="was removed"):
            lock.require()


def take_often(folder: Path, count: int, failures: "multiprocessing.Queue[str]") -> None:
    """Each time the folder is new, and gone again; a second process in it would find the mark."""
    mark = folder.parent.parent / "mark"
    for _ in range(count):
        try:
            with RunLock(folder, wait_here_s=30) as lock:
                lock.acquire()
                mark.touch(exist_ok=False)
                mark.unlink()
        except (OSError, ValueError) as error:
            failures.put(f"{type(error).__name__}: {error}")
    failures.put("")


def test_processes_that_take_a_folder_at_the_same_time(tmp_path: Path):
    """One at a time, whatever the others do to the folder between its making, its lock and its end."""
    failures: multiprocessing.Queue[str] = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=take_often, args=(tmp_path / "a" / "run", 150, failures)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = []
    while found.count("") < len(processes):
        found.append(failures.get(timeout=60))
    for process in processes:
        process.join()
    assert [failure for failure in found if failure] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
