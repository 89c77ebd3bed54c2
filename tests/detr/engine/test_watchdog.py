"""Stalls are reported with rank, phase and who keeps the others waiting."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from detr.engine import watchdog as module
from detr.engine.watchdog import Watchdog


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "nothing was said"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)


def test_a_stall_is_said_once_with_its_phase(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    with Watchdog(0.1) as watchdog:
        watchdog.enter(12, "data")
        wait_for(lambda: caplog.records)
        time.sleep(0.3)
    [message] = [record.message for record in caplog.records]
    assert "rank 0 has been in data after step 12 for 0 s" in message
    assert "test_a_stall_is_said_once_with_its_phase" in capfd.readouterr().err


STORE = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_stalls_are_said_without_a_store(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    """torchrun or its machine is gone, which leaves the other ranks hanging: one stall after another."""
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        stdout = keeper.stdout
        assert stdout is not None
        store = TCPStore("127.0.0.1", int(stdout.readline()), is_master=False)
        keeper.kill()
    with Watchdog(0.1, world_size=2, store=store) as watchdog:
        for step in (12, 13):
            watchdog.enter(step, "training step")
            wait_for(lambda step=step: f"in training step after step {step}" in caplog.text)
    assert caplog.text.count("look whether torchrun and the machine of rank 0 are still there") == 2
    assert "test_stalls_are_said_without_a_store" in capfd.readouterr().err


def test_progress_is_no_stall(caplog: pytest.LogCaptureFixture):
    with Watchdog(0.5) as watchdog:
        for step in range(20):
            watchdog.enter(step, "training step")
            time.sleep(0.05)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("places", "verdict"),
    [
        ([(12, "training step"), (12, "data")], "rank 1 keeps the others waiting"),
        ([(11, "training step"), (12, "saving")], "rank 0 keeps the others waiting"),
        ([(12, "training step"), (12, "training step")], "all ranks are in the same place"),
        ([(12, "training step"), None], "rank 1 says nothing: it is at work, stopped or gone"),
    ],
)
def test_ranks_compare_where_they_are(
    places: list[tuple[int, str] | None], verdict: str, caplog: pytest.LogCaptureFixture
):
    store = HashStore()
    watchdogs = [Watchdog(0.1, rank=rank, world_size=2, store=store) for rank in range(2)]
    for watchdog, place in zip(watchdogs, places, strict=True):
        if place is not None:
            watchdog.__enter__()
            watchdog.enter(*place)
    wait_for(lambda: len(caplog.records) == sum(place is not None for place in places))
    for watchdog in watchdogs:
        watchdog.__exit__(None, None, None)
    for record in caplog.records:
        assert verdict in record.message
        for rank, place in enumerate(places):
            if place is not None:
                assert f"rank {rank}: {place[1]} after step {place[0]}" in record.message


def test_a_run_that_hangs_says_in_what(
    trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    run = trainer(tmp_path, epochs=1, hang_s=1.0)
    load = run.train_loader.dataset.__class__.load
    release = threading.Event()

    def hang(dataset: Any, index: int, batch_draw: float | None) -> Any:
        if run.progress.global_step == 1:
            release.wait()
        return load(dataset, index, batch_draw)

    timer = threading.Thread(target=lambda: (wait_for(lambda: caplog.records), release.set()))
    timer.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.train_loader.dataset.__class__, "load", hang)
        run.fit()
    timer.join()
    assert "rank 0 has been in data after step 1" in caplog.records[0].message
    assert "hang" in capfd.readouterr().err


def test_a_rank_that_goes_on_takes_back_what_it_said(caplog: pytest.LogCaptureFixture):
    store = HashStore()
    with Watchdog(0.1, rank=1, world_size=2, store=store) as watchdog:
        watchdog.enter(3, "data")
        wait_for(lambda: caplog.records)
        assert store.check(["watchdog/1"])
        wait_for(lambda: watchdog.enter(4, "data") or not store.check(["watchdog/1"]))
