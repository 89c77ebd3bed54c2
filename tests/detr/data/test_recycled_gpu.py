"""Recycled batches beside a real GPU: page-locked, copied unharmed, and no trouble for captures."""

import contextlib
import gc

import pytest
import torch

from detr.data import EvalTransform, SyntheticDataset, build_train_loader
from detr.data.page_locks import CudaPageLocker
from detr.data.recycled import MAX_BUFFERS_A_WORKER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def loader(*, num_workers=2, num_images=400, pin_memory=True):
    dataset = SyntheticDataset("train", EvalTransform(None, None), num_images=num_images, size=64)
    return build_train_loader(dataset, batch_size=2, num_workers=num_workers, pad_to=1, seed=0, pin_memory=pin_memory)


def busy():
    """Keeps the current stream at work for some milliseconds."""
    torch.cuda._sleep(10_000_000)


def test_copies_arrive_unharmed_while_the_batches_are_dropped_at_once():
    """The stream lags behind: workers that took a buffer too early would write into what is still to be copied."""
    expected = [batch.images.pixels for batch in loader(num_workers=0, pin_memory=False)]
    assert len(expected) == 200
    copies, num_locked = [], 0
    for batch in loader():
        # a stream this far behind leaves a worker without a free buffer now and then, and the batch in other memory
        num_locked += batch.images.pixels.is_pinned()
        pixels = batch.images.pixels.pin_memory()
        assert pixels is batch.images.pixels or not batch.images.pixels.is_pinned()
        busy()
        copies.append(pixels.to("cuda", non_blocking=True))
        del batch, pixels
    # every buffer at least once
    assert num_locked >= 2 * MAX_BUFFERS_A_WORKER
    for copy, reference in zip(copies, expected, strict=True):
        assert torch.equal(copy.cpu(), reference)


def test_a_consumer_that_keeps_up_gets_locked_memory_alone():
    for batch in loader():
        assert batch.images.pixels.is_pinned()
        batch.images.pixels.to("cuda", non_blocking=True)
        torch.cuda.synchronize()


def test_a_copy_out_of_a_buffer_makes_nobody_wait():
    batches = iter(loader())
    next(batches)
    batch = next(batches)
    torch.cuda.synchronize()
    busy()
    event = torch.cuda.Event()
    batch.images.pixels.to("cuda", non_blocking=True)
    event.record()
    assert not event.query()


def test_beside_captures():
    """Each capture meets a loader that sends, locks and frees; a call in another thread would end it."""
    weights = torch.rand(3, device="cuda")
    captured = 0
    for number, batch in enumerate(loader(num_images=80)):
        pixels = batch.images.pixels.to("cuda", non_blocking=True)
        if number % 5 == 0:
            static = pixels.clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = (static.float() * weights[:, None, None]).sum()
            captured += 1
        static.copy_(pixels)
        graph.replay()
        reference = (batch.images.pixels.float() * weights.cpu()[:, None, None]).sum()
        torch.testing.assert_close(total.cpu(), reference, rtol=1e-4, atol=1e-3)
    assert captured == 8


def test_locks_go_with_the_loader_and_its_batches_stay():
    batches = iter(loader())
    batch = next(batches)
    pixels = batch.images.pixels.clone()
    assert batch.images.pixels.is_pinned()
    batches.close()
    del batches
    gc.collect()
    assert not batch.images.pixels.is_pinned()
    assert torch.equal(batch.images.pixels, pixels)


def test_the_errors_of_cuda_are_raised():
    locker = CudaPageLocker()
    memory = torch.zeros(2**20, dtype=torch.uint8).share_memory_()
    locker.lock(memory.data_ptr(), memory.numel())
    with pytest.raises(MemoryError, match=r"cannot page-lock 1 MiB .*lower data.num_workers"):
        locker.lock(memory.data_ptr(), memory.numel())
    locker.unlock(memory.data_ptr())
    with pytest.raises(RuntimeError, match="cannot unlock"):
        locker.unlock(memory.data_ptr())
    # CUDA names a refused call once more to whoever asks next
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
