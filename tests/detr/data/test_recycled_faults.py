"""Recycled batches when things go wrong: iterations left anywhere, workers killed; and nothing that grows."""

import gc
import os
import random
import signal
from itertools import islice
from pathlib import Path

import pytest
import torch

from detr.data import SyntheticDataset, build_train_loader, build_val_loader, detr_augmentation
from detr.data.loader import DetectionLoader
from detr.data.recycled import MAX_BUFFERS_A_WORKER


def train_loader(num_workers: int, num_images: int = 24) -> DetectionLoader:
    transforms = detr_augmentation([48, 64, 80, 96, 400], 500, (70, 90), (48, 80))
    dataset = SyntheticDataset("train", transforms, num_images=num_images, size=64)
    return build_train_loader(dataset, batch_size=2, num_workers=num_workers, pad_to=1, seed=0)


def expected_pixels(num_epochs: int) -> list[list[torch.Tensor]]:
    loader, epochs = train_loader(0), []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        epochs.append([batch.images.pixels for batch in loader])
    return epochs


@pytest.mark.parametrize("num_workers", [1, 2])
def test_iterations_left_anywhere_with_batches_kept_anywhere(num_workers):
    """Workers are then still busy with what nobody will take."""
    expected, loader, draw = expected_pixels(3), train_loader(num_workers), random.Random(num_workers)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(25):
        epoch, start = draw.randrange(3), draw.randrange(3)
        loader.set_epoch(epoch, start=2 * start)
        for number, batch in enumerate(islice(loader, draw.choice([0, 1, 2, 5, 12])), start):
            assert torch.equal(batch.images.pixels, expected[epoch][number])
            if draw.random() < 0.2:
                kept.append((batch.images.pixels, expected[epoch][number]))
            if len(kept) > 4:
                kept.pop(draw.randrange(5))
            assert all(torch.equal(pixels, wanted) for pixels, wanted in kept)


def test_training_and_evaluation_in_turns():
    """As the trainer does: an evaluation within an epoch, whose workers are forked when buffers lie there already."""
    train, val = train_loader(1), build_val_loader(train_loader(0).dataset, batch_size=5, num_workers=1, pad_to=1)
    wanted = [batch.images.pixels for batch in build_val_loader(train.dataset, batch_size=5, num_workers=0, pad_to=1)]
    assert len(wanted[-1]) == 4
    for epoch, of_epoch in enumerate(expected_pixels(2)):
        train.set_epoch(epoch)
        for number, (batch, expected) in enumerate(zip(train, of_epoch, strict=True)):
            if number in (3, 8):
                for val_batch, val_expected in zip(val, wanted, strict=True):
                    assert torch.equal(val_batch.images.pixels, val_expected)
            assert torch.equal(batch.images.pixels, expected)


@pytest.mark.timeout(120)
def test_a_worker_that_is_killed_costs_the_loader_and_no_batch(monkeypatch):
    monkeypatch.setattr("detr.data.loader.SECONDS_UNTIL_A_DEATH_IS_KNOWN", 0.1)
    loader = train_loader(1, num_images=200)
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    copies = [batch.images.pixels.clone() for batch in kept]
    os.kill(worker_pids(loader)[0], signal.SIGKILL)
    with pytest.raises(ChildProcessError, match="worker died"):
        list(batches)
    # and again, instead of waiting for it
    with pytest.raises(ChildProcessError, match="worker died"):
        list(loader)
    for batch, copy in zip(kept, copies, strict=True):
        assert torch.equal(batch.images.pixels, copy)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_nothing_grows_over_epochs_of_random_sizes():
    """Files and shared memory of all processes; buffers are replaced by larger ones on the way."""
    loader = train_loader(2, num_images=80)
    uses = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        for batch in loader:
            assert len(batch) == 2
        del batch
        gc.collect()
        uses.append([of_process(pid) for pid in (os.getpid(), *worker_pids(loader))])
    # which epoch needs the last buffer is chance; one more than after the first two would be growth every time
    most_files, most_bytes = 4, 4 * 2**20
    for process in range(3):
        files, num_bytes = ([use[process][kind] for use in uses] for kind in (0, 1))
        assert files[3] - files[1] <= most_files, uses
        assert num_bytes[3] - num_bytes[1] <= most_bytes, uses
    assert len(loader._buffers._memory) <= 2 * MAX_BUFFERS_A_WORKER


def worker_pids(loader: DetectionLoader) -> list[int]:
    return [worker.pid for worker in loader._batches._iterator._workers]  # type: ignore[union-attr]


def of_process(pid: int) -> tuple[int, int]:
    """Open files, and bytes of shared memory that are mapped."""
    spans = [
        line.split()[0].split("-")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/torch_" in line
    ]
    return len(os.listdir(f"/proc/{pid}/fd")), sum(int(end, 16) - int(begin, 16) for begin, end in spans)
