"""Memory that is used again, in whole loaders: right pixels whatever the consumer keeps, and few buffers."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch

from detr.data import SyntheticDataset, build_train_loader, detr_augmentation
from detr.data.loader import DetectionLoader
from detr.data.page_locks import CudaPageLocker
from detr.data.recycled import MAX_BUFFERS_A_WORKER


def random_sizes(num_images: int = 24) -> SyntheticDataset:
    transforms = detr_augmentation([48, 64, 80, 96, 400], 500, (70, 90), (48, 80))
    return SyntheticDataset("train", transforms, num_images=num_images, size=64)


def train_loader(num_workers: int, num_images: int = 24) -> DetectionLoader:
    return build_train_loader(random_sizes(num_images), batch_size=2, num_workers=num_workers, pad_to=1, seed=0)


def num_buffers(loader: DetectionLoader) -> int:
    return len(loader._buffers._memory)


def test_pixels_are_right_while_the_consumer_holds_on_to_some():
    """Batches and views of them, over two epochs with the same workers; compared when the loader is long past them."""
    expected, reference = [], train_loader(0)
    for epoch in range(2):
        reference.set_epoch(epoch)
        expected += [batch.images.pixels for batch in reference]
    loader, kept, number = train_loader(2), [], 0
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            pixels = batch.images.pixels
            assert torch.equal(pixels, expected[number])
            if number % 5 == 0:
                kept.append((number, pixels, slice(None)))
            elif number % 5 == 2:
                kept.append((number, pixels[1:, :, 3:], (slice(1, None), slice(None), slice(3, None))))
            if len(kept) > 3:
                kept.pop(1)
            number += 1
            for index, held, rows in kept:
                assert torch.equal(held, expected[index][rows])
    assert number == len(expected) == 24


def test_a_loop_needs_few_buffers():
    loader = train_loader(1, num_images=60)
    for _ in range(2):
        for batch in loader:
            assert batch.images.pixels.numel() > 0
    # two are on their way, one is written, the loop has one and the one before
    assert num_buffers(loader) <= 5


def test_who_keeps_every_batch_has_every_batch():
    batches = list(train_loader(1, num_images=60))
    for batch, expected in zip(batches, train_loader(0, num_images=60), strict=True):
        assert torch.equal(batch.images.pixels, expected.images.pixels)


def test_iterations_that_are_left_lose_no_buffers():
    loader = train_loader(1)
    expected = [batch.images.pixels for batch in train_loader(0)]
    for _ in range(12):
        for batch, reference in zip(islice(loader, 2), expected, strict=False):
            assert torch.equal(batch.images.pixels, reference)
    del batch
    assert num_buffers(loader) < MAX_BUFFERS_A_WORKER
    for batch, reference in zip(loader, expected, strict=True):
        assert torch.equal(batch.images.pixels, reference)


def test_loaders_side_by_side_do_not_meet():
    loaders = [train_loader(1), train_loader(1), train_loader(0)]
    for batches in zip(*loaders, strict=True):
        first, second, reference = (batch.images.pixels for batch in batches)
        assert torch.equal(first, reference)
        assert torch.equal(second, reference)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(run_program: Callable[[str], str], method: str):
    printed = run_program(
        "import multiprocessing\n"
        "from detr.data import EvalTransform, SyntheticDataset, build_val_loader\n"
        "def main():\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        "    data = SyntheticDataset('val', EvalTransform(None, None), num_images=12, size=64)\n"
        "    loaders = [build_val_loader(data, batch_size=2, num_workers=n, pad_to=1) for n in (1, 0)]\n"
        "    for _ in range(2):\n"
        "        for one, other in zip(*loaders, strict=True):\n"
        "            assert (one.images.pixels == other.images.pixels).all()\n"
        "    print(len(loaders[0]._buffers._memory))\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    # how many depends on how slow the main process is
    assert 1 <= int(printed) <= MAX_BUFFERS_A_WORKER


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_page_locks_without_a_gpu_are_refused():
    with pytest.raises(ValueError, match=r"pin_memory=true .* Set it to false"):
        CudaPageLocker()
    with pytest.raises(ValueError, match="pin_memory=true"):
        build_train_loader(random_sizes(), batch_size=2, num_workers=1, pad_to=1, seed=0, pin_memory=True)
