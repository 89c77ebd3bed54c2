"""Batches in memory that is used again: right pixels whatever the consumer keeps, few buffers, and no early reuse."""

import gc
import weakref

import numpy as np
import pytest
import torch

from detr.data import SyntheticDataset, collate, detr_augmentation
from detr.data.collate import PackedBatch
from detr.data.loader import DetectionLoader
from detr.data.recycled import (
    FREE,
    HELD,
    MAX_BUFFERS_A_WORKER,
    SENT,
    BufferStates,
    ReceivedBuffers,
    SharedPixels,
    WorkerBuffers,
)
from detr.data.samplers import EvalSampler
from detr.structures import Target


def samples(value: int, *, height: int = 20, width: int = 30) -> list[tuple[torch.Tensor, Target]]:
    """Two images of one value, the second of them smaller."""
    target = Target(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), 1, (4, 4))
    return [
        (torch.full((3, *size), value, dtype=torch.uint8), target)
        for size in ((height, width), (height - 3, width - 5))
    ]


class LateMark:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


class FakeLocker:
    """Records what is locked; its marks are passed when a test says so."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.marks: list[LateMark] = []
        self.num_waits = 0
        self.limit = 1000

    def lock(self, address: int, num_bytes: int) -> None:
        if len(self.locked) == self.limit:
            raise MemoryError("cannot page-lock")
        assert address not in self.locked
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def mark(self) -> LateMark:
        self.marks.append(LateMark())
        return self.marks[-1]

    def wait(self) -> None:
        self.num_waits += 1


class Pair:
    """A worker and the main process in one."""

    def __init__(self, locker: FakeLocker | None = None) -> None:
        self.states = BufferStates(1)
        self.worker = WorkerBuffers(self.states, 0)
        self.main = ReceivedBuffers(self.states, locker)

    def send(self, value: int, **size: int) -> PackedBatch:
        return PackedBatch.pack(samples(value, **size), 1, self.worker)

    def pixels(self, value: int, **size: int) -> torch.Tensor:
        self.main.recycle()
        return self.send(value, **size).unpack(self.main).images.pixels


def slot_of(packed: PackedBatch) -> int:
    assert isinstance(packed.pixels, SharedPixels)
    return packed.pixels.slot


def test_a_buffer_crosses_once_and_is_used_again():
    pair = Pair()
    first = pair.send(1)
    assert isinstance(first.pixels, SharedPixels)
    assert first.pixels.memory is not None
    pixels = first.unpack(pair.main).images.pixels
    address = pixels.data_ptr()
    del pixels
    pair.main.recycle()
    second = pair.send(2)
    assert slot_of(second) == slot_of(first)
    assert isinstance(second.pixels, SharedPixels)
    assert second.pixels.memory is None
    pixels = second.unpack(pair.main).images.pixels
    assert pixels.data_ptr() == address
    assert torch.equal(pixels, collate(samples(2), 1).images.pixels)


@pytest.mark.parametrize(
    "view",
    [
        lambda pixels: pixels[1, :, 2:, 3:],
        lambda pixels: pixels.permute(0, 2, 3, 1).flatten(),
        lambda pixels: pixels.numpy()[1:],
        lambda pixels: torch.from_numpy(pixels.numpy()).view(torch.int8),
        lambda pixels: pixels.untyped_storage(),
    ],
)
def test_a_view_keeps_its_buffer(view):
    pair = Pair()
    kept = view(pair.pixels(1))
    seen = [int(pair.pixels(value)[0, 0, 0, 0]) for value in range(2, 20)]
    assert seen == list(range(2, 20))
    assert pair.states[0, 0] == HELD
    assert set(np.asarray(torch.as_tensor(kept).to(torch.uint8)).ravel().tolist()) <= {0, 1}
    del kept
    pair.main.recycle()
    assert pair.states[0, 0] == FREE


def test_who_keeps_all_batches_gets_ordinary_memory_in_the_end():
    pair = Pair()
    kept = [pair.pixels(value) for value in range(MAX_BUFFERS_A_WORKER + 3)]
    assert isinstance(pair.send(99).pixels, torch.Tensor)
    for value, pixels in enumerate(kept):
        assert torch.equal(pixels, collate(samples(value), 1).images.pixels)
    del kept, pixels
    pair.main.recycle()
    assert isinstance(pair.send(99).pixels, SharedPixels)


def test_a_larger_batch_replaces_a_buffer_that_is_free():
    locker = FakeLocker()
    pair = Pair(locker)
    held = pair.pixels(1)
    small = pair.pixels(2)
    assert sorted(locker.locked.values()) == [2**20, 2**20]
    gone = weakref.ref(pair.main._memory[0, 1])
    del small
    pair.main.recycle()
    for mark in locker.marks:
        mark.is_done = True
    large = pair.pixels(3, height=700, width=1000)
    assert sorted(locker.locked.values()) == [2**20, 5 * 2**20]
    gc.collect()
    assert gone() is None
    assert torch.equal(held, collate(samples(1), 1).images.pixels)
    assert torch.equal(large, collate(samples(3, height=700, width=1000), 1).images.pixels)
    # the next one is as large, whatever it is needed for; a small batch takes the smallest that will do
    third = pair.pixels(4)
    assert sorted(locker.locked.values()) == [2**20, 5 * 2**20, 5 * 2**20]
    del held, large, third
    pair.main.recycle()
    locker.marks[-1].is_done = True
    pair.main.recycle()
    assert slot_of(pair.send(5)) == 0


def test_a_new_buffer_has_room_for_the_largest_batch_of_all_workers():
    states = BufferStates(2)
    first, second = WorkerBuffers(states, 0), WorkerBuffers(states, 1)
    PackedBatch.pack(samples(1, height=700, width=1000), 1, first)
    packed = PackedBatch.pack(samples(2), 1, second)
    assert second.memory(slot_of(packed)).numel() == 5 * 2**20


def test_a_buffer_is_free_when_the_device_is_done_and_not_before():
    locker = FakeLocker()
    pair = Pair(locker)
    first = pair.pixels(1)
    pair.main.recycle()
    # nothing has been released
    assert locker.marks == []
    del first
    assert pair.states[0, 0] == HELD
    second = pair.pixels(2)
    (mark,) = locker.marks
    assert pair.states[0, 0] == HELD
    del second
    third = pair.pixels(3)
    assert [pair.states[0, slot] for slot in range(3)] == [HELD, HELD, HELD]
    # the second mark is behind the first: it says nothing before that
    locker.marks[1].is_done = True
    pair.main.recycle()
    assert [pair.states[0, slot] for slot in range(3)] == [HELD, HELD, HELD]
    mark.is_done = True
    pair.main.recycle()
    assert [pair.states[0, slot] for slot in range(3)] == [FREE, FREE, HELD]
    assert int(third[0, 0, 0, 0]) == 3


def test_batches_that_were_lost_on_their_way_come_back_with_the_next_iteration():
    locker = FakeLocker()
    pair = Pair(locker)
    held = pair.pixels(1)
    lost = [pair.send(2), pair.send(3)]
    assert [pair.states[0, slot] for slot in range(3)] == [HELD, SENT, SENT]
    del lost
    pair.states.begin_iteration()
    again = pair.send(4)
    # the main process never had this memory
    assert slot_of(again) == 1
    assert isinstance(again.pixels, SharedPixels)
    assert again.pixels.memory is not None
    assert torch.equal(again.unpack(pair.main).images.pixels, collate(samples(4), 1).images.pixels)
    assert [pair.states[0, slot] for slot in range(3)] == [HELD, HELD, FREE]
    assert int(held[0, 0, 0, 0]) == 1
    # memory that crosses twice is locked once
    pair.main.recycle()
    locker.marks[-1].is_done = True
    pair.main.recycle()
    assert slot_of(pair.send(5)) == 1
    pair.states.begin_iteration()
    pair.pixels(6)
    assert len(locker.locked) == 2


def test_all_is_unlocked_after_the_device_is_done_when_the_loader_goes():
    locker = FakeLocker()
    pair = Pair(locker)
    kept = pair.pixels(1)
    pair.pixels(2)
    assert len(locker.locked) == 2
    pair.main = None  # type: ignore[assignment]
    gc.collect()
    assert locker.locked == {}
    assert locker.num_waits == 1
    assert torch.equal(kept, collate(samples(1), 1).images.pixels)


def test_memory_that_cannot_be_locked_is_an_error_that_says_so():
    locker = FakeLocker()
    locker.limit = 1
    pair = Pair(locker)
    kept = pair.pixels(1)
    with pytest.raises(MemoryError, match="cannot page-lock"):
        pair.pixels(2)
    assert int(kept[0, 0, 0, 0]) == 1


def test_marks_that_are_late_keep_buffers_in_a_loader():
    locker = FakeLocker()
    transforms = detr_augmentation([48, 64, 80, 96, 400], 500, (70, 90), (48, 80))
    dataset = SyntheticDataset("train", transforms, num_images=24, size=64)
    loader = DetectionLoader(
        dataset,
        EvalSampler(len(dataset)),
        batch_size=2,
        num_workers=1,
        pad_to=1,
        drop_last=False,
        page_locker=locker,
    )
    addresses = set()
    for number, batch in enumerate(loader):
        addresses.add(batch.images.pixels.data_ptr())
        if number == 6:
            # no mark was passed, so nothing could be used again
            assert len(addresses) == 7
            assert set(locker.locked) <= addresses
        if number >= 6:
            for mark in locker.marks:
                mark.is_done = True
    assert len(locker.locked) <= MAX_BUFFERS_A_WORKER
    assert len(addresses) < 12
