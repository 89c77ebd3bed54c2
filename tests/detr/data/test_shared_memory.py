"""Shared memory that is used up: one error that says so, whoever needed it, and never a wait for a batch."""

import errno
import os

import pytest
import torch

from detr.data import EvalTransform, SyntheticDataset, build_val_loader, shared_memory
from detr.data.collate import PackedBatch
from detr.data.loader import DetectionLoader
from detr.data.recycled import MAX_BUFFERS_A_WORKER, BufferStates, WorkerBuffers
from detr.data.shared_memory import new_shared_memory
from detr.data.workers import WorkerLog

# a batch that never comes fails the test soon
pytestmark = pytest.mark.timeout(60)

SAYS_WHAT_TO_DO = r"holds \d+ MiB, \d+ of them free.*--shm-size=8g.*--ipc=host.* data\.num_workers"


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm with a page left."""
    monkeypatch.setattr(shared_memory, "_space_bytes", lambda: (64 * 2**20, 4096))


@pytest.fixture
def another_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room when it is asked for, and none when it is taken."""
    give_no_memory(monkeypatch, f"unable to allocate: {os.strerror(errno.ENOSPC)} ({errno.ENOSPC})")


def give_no_memory(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def share_memory_(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory_)


def val_loader() -> DetectionLoader:
    dataset = SyntheticDataset("val", EvalTransform(None, None), num_images=60, size=64)
    return build_val_loader(dataset, batch_size=2, num_workers=1, pad_to=1)


def test_there_is_memory():
    memory = new_shared_memory(100)
    assert memory.is_shared()
    assert (memory.shape, memory.dtype) == ((100,), torch.uint8)


@pytest.mark.parametrize("lack", ["no_room", "another_was_faster"])
def test_a_lack_is_an_error_with_the_numbers_and_what_to_do(lack, request):
    request.getfixturevalue(lack)
    with pytest.raises(OSError, match=f"needs 5 MiB more of shared memory.*{SAYS_WHAT_TO_DO}"):
        new_shared_memory(5 * 2**20)


def test_another_fault_stays_what_it_is(monkeypatch):
    give_no_memory(monkeypatch, "too many open files (24)")
    with pytest.raises(RuntimeError, match="too many open files"):
        new_shared_memory(1)


def test_a_system_without_the_folder_has_no_limit_to_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "SHARED_FOLDER", tmp_path / "none")
    assert new_shared_memory(1).is_shared()
    give_no_memory(monkeypatch, f"({errno.ENOSPC})")
    with pytest.raises(OSError, match=r"needs 1 MiB .* lower data\.num_workers"):
        new_shared_memory(2**20)


@pytest.mark.parametrize("lack", ["no_room", "another_was_faster"])
def test_a_worker_without_room_ends_the_loop_with_that_error_alone(lack, request):
    loader = val_loader()
    request.getfixturevalue(lack)
    for _ in range(2):
        with pytest.raises(OSError, match=SAYS_WHAT_TO_DO) as error:
            list(loader)
        assert "Traceback" not in str(error.value)


def test_nothing_of_a_batch_is_left_for_the_thread_that_sends(monkeypatch):
    """Also where all buffers are in use: what fails in that thread is a batch that never comes."""
    dataset = SyntheticDataset("val", EvalTransform(None, None), num_images=2, size=64)
    samples = [dataset.load(index, None) for index in range(2)]
    worker = WorkerBuffers(BufferStates(1), 0)
    packed = [PackedBatch.pack(samples, 1, worker) for _ in range(MAX_BUFFERS_A_WORKER + 2)]
    tensors = [each.pixels if isinstance(each.pixels, torch.Tensor) else each.pixels.memory for each in packed]
    assert isinstance(packed[-1].pixels, torch.Tensor)
    assert all(tensor is not None and tensor.is_shared() for tensor in tensors)
    monkeypatch.setattr(shared_memory, "_space_bytes", lambda: (64 * 2**20, 4096))
    with pytest.raises(OSError, match=SAYS_WHAT_TO_DO):
        PackedBatch.pack(samples, 1, worker)


def test_a_worker_that_dies_of_it_all_the_same_says_so():
    log = WorkerLog(1)
    assert log._rows is not None
    log._rows[0] = torch.tensor([77, 1])
    dataset = SyntheticDataset("val", EvalTransform(None, None), num_images=2, size=64)
    message = log.explain(RuntimeError("DataLoader worker (pid 77) is killed by signal: Bus error. It is"), dataset)
    assert message is not None
    assert "--shm-size=8g" in message
    killed = log.explain(RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed."), dataset)
    assert killed is not None
    assert "shm" not in killed
