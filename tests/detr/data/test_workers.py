"""Data workers that die name their sample; workers leave stop signals to the main process."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.data import CocoDataset, EvalTransform, SyntheticDataset, flip_and_resize
from detr.data.loader import DetectionLoader, build_val_loader
from detr.data.workers import WorkerLog


class SignalledDataset(SyntheticDataset):
    """Sends its own process a signal at sample 3."""

    number = signal.SIGKILL

    def load(self, index: int, batch_draw: float | None) -> Any:
        if index == 3:
            os.kill(os.getpid(), self.number)
        return super().load(index, batch_draw)


def make_loader(number: signal.Signals) -> DetectionLoader:
    dataset = SignalledDataset("val", EvalTransform(None, None), num_images=6, size=64)
    dataset.number = number
    return build_val_loader(dataset, batch_size=2, num_workers=1, pad_to=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_names_its_sample(number: signal.Signals):
    loader = make_loader(number)
    # PyTorch interrupts the main process while it waits for the batch, or in what it does with one
    with pytest.raises(ChildProcessError, match=r"worker died .* loaded sample 3\. .*num_workers"):
        train_on(loader)


@pytest.mark.parametrize("first", [ConnectionResetError, ConnectionRefusedError, BrokenPipeError, EOFError])
def test_a_worker_that_dies_while_it_hands_over_a_batch_names_its_sample(first: type[Exception]):
    """The connection that carries the batch breaks before the main process hears of the death."""
    loader = make_loader(signal.SIGCONT)
    with pytest.raises(ChildProcessError, match=r"worker died .* loaded sample \d"):
        lose_the_worker(loader, first())


def lose_the_worker(loader: DetectionLoader, first: Exception) -> None:
    with loader.naming_dead_workers():
        next(iter(loader))
        assert loader._worker_log._rows is not None
        worker = int(loader._worker_log._rows[0, 0])
        threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)).start()
        raise first


def test_a_broken_connection_of_something_else_stays_what_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("detr.data.loader.SECONDS_UNTIL_A_DEATH_IS_KNOWN", 0.1)
    with pytest.raises(ConnectionResetError, match="another"), make_loader(signal.SIGCONT).naming_dead_workers():
        raise ConnectionResetError("another")


def train_on(loader: DetectionLoader) -> None:
    with loader.naming_dead_workers():
        for _ in loader:
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_workers_leave_the_end_to_the_main_process(run_program: Callable[[str], str], number: signal.Signals):
    """In a process of its own, as training is: this one has run threads that a forked worker may inherit anew."""
    printed = run_program(
        "import os\n"
        "from detr.data import EvalTransform, SyntheticDataset, build_val_loader\n"
        "class Signalled(SyntheticDataset):\n"
        "    def load(self, index, batch_draw):\n"
        "        if index == 3:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "        return super().load(index, batch_draw)\n"
        "data = Signalled('val', EvalTransform(None, None), num_images=6, size=64)\n"
        "loader = build_val_loader(data, batch_size=2, num_workers=1, pad_to=1)\n"
        "print([target.image_id for batch in loader for target in batch.targets])\n"
    )
    assert printed == "[1, 2, 3, 4, 5, 6]\n"


def test_the_file_of_the_sample_is_named(tmp_path: Path):
    SyntheticDataset("val", flip_and_resize(None), num_images=2, size=64).write_coco(tmp_path)
    [images] = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "annotations"]
    [annotations] = (tmp_path / "annotations").iterdir()
    dataset = CocoDataset(annotations, images, EvalTransform(None, None), training=False)
    log = WorkerLog(2)
    assert log._rows is not None
    log._rows[1] = torch.tensor([77, 1])
    killed = RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. \nhow to debug")
    message = log.explain(killed, dataset)
    assert message is not None
    assert f"sample 1 ({dataset.image_path(1)})" in message
    assert log.explain(RuntimeError("DataLoader worker (pid(s) 78) exited unexpectedly"), dataset) is None
    assert log.explain(RuntimeError("pid 77 and something else"), dataset) is None


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_program_that_ends_with_workers_alive_does_end(run_program: Callable[[str], str], method: str):
    """Python waits at its exit for workers that it has sent SIGTERM: one that is idle, one that would load forever."""
    # libraries have no threads of their own there: SIGTERM would end the worker through one, whoever sent it
    printed = run_program(
        "import multiprocessing, time\n"
        "from detr.data import EvalTransform, SyntheticDataset, build_val_loader\n"
        "class Endless(SyntheticDataset):\n"
        "    def load(self, index, batch_draw):\n"
        "        if index == 3:\n"
        "            print('loads', flush=True)\n"
        "            time.sleep(1000)\n"
        "        return super().load(index, batch_draw)\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    data = Endless('val', EvalTransform(None, None), num_images=4, size=64)\n"
        "    loader = build_val_loader(data, batch_size=1, num_workers=2, pad_to=1)\n"
        "    batches = iter(loader)\n"
        "    for _ in range(3):\n"
        "        next(batches)\n"
        "    while loader._worker_log._rows[1, 1] != 3:\n"
        "        time.sleep(0.01)\n"
        "    print('ends', flush=True)\n"
    )
    assert sorted(printed.split()) == ["ends", "loads"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the default stands")
@pytest.mark.parametrize(("chosen", "process"), [(None, "ForkProcess"), ("spawn", "SpawnProcess")])
def test_workers_are_forked_unless_the_program_chose_otherwise(
    run_program: Callable[[str], str], chosen: str | None, process: str
):
    choice = "pass" if chosen is None else f"multiprocessing.set_start_method({chosen!r})"
    printed = run_program(
        "import multiprocessing\n"
        "from detr.data import EvalTransform, SyntheticDataset, build_val_loader\n"
        "class Saying(SyntheticDataset):\n"
        "    def load(self, index, batch_draw):\n"
        "        print(type(multiprocessing.current_process()).__name__, flush=True)\n"
        "        return super().load(index, batch_draw)\n"
        "if __name__ == '__main__':\n"
        "    # as from Python 3.14 on\n"
        "    multiprocessing.context._default_context._default_context = multiprocessing.get_context('forkserver')\n"
        f"    {choice}\n"
        "    data = Saying('val', EvalTransform(None, None), num_images=1, size=64)\n"
        "    assert len(list(build_val_loader(data, batch_size=1, num_workers=1, pad_to=1))) == 1\n"
    )
    assert printed.split() == [process]
