"""Samples put together into a batch, and the batch packed for its way from a worker."""

import pickle

import pytest
import torch

from detr.data import SyntheticDataset, collate, detr_augmentation
from detr.data.collate import PackedBatch
from detr.data.recycled import MAX_BUFFERS_A_WORKER, BufferStates, ReceivedBuffers, SharedPixels, WorkerBuffers


def loaded(num_images):
    """Samples of several sizes."""
    transforms = detr_augmentation([64, 80, 96], 120, (70, 90), (48, 80))
    dataset = SyntheticDataset("train", transforms, num_images=num_images, size=64)
    return [dataset[index] for index in range(num_images)]


def test_collate_pads_at_the_bottom_and_the_right_and_rounds_up():
    samples = loaded(6)
    batch = collate(samples, pad_to=32)
    _, _, H, W = batch.images.pixels.shape
    assert H % 32 == 0
    assert W % 32 == 0
    assert len({tuple(size) for size in batch.images.sizes.tolist()}) > 1
    for (image, target), pixels, size, batched in zip(
        samples, batch.images.pixels, batch.images.sizes.tolist(), batch.targets, strict=True
    ):
        h, w = size
        assert (h, w) == image.shape[1:]
        assert torch.equal(pixels[:, :h, :w], image)
        assert not pixels[:, h:].any()
        assert not pixels[:, :, w:].any()
        assert batched is target
    assert collate(samples[:1], pad_to=1).images.pixels.shape[2:] == samples[0][0].shape[1:]


@pytest.mark.parametrize("num_before", [0, MAX_BUFFERS_A_WORKER])
def test_a_packed_batch_is_the_batch_again(num_before):
    """Also where all buffers of its worker are in use."""
    samples = loaded(4)
    batch = collate(samples, pad_to=8)
    states = BufferStates(1)
    worker, main = WorkerBuffers(states, 0), ReceivedBuffers(states, None)
    for _ in range(num_before):
        assert isinstance(PackedBatch.pack(samples, 8, worker).pixels, SharedPixels)
    packed = pickle.loads(pickle.dumps(PackedBatch.pack(samples, 8, worker)))
    again = packed.unpack(main)
    assert again.images.pixels.stride() == batch.images.pixels.stride()
    assert torch.equal(again.images.pixels, batch.images.pixels)
    assert torch.equal(again.images.padding_mask, batch.images.padding_mask)
    assert torch.equal(again.images.sizes, batch.images.sizes)
    for found, expected in zip(again.targets, batch.targets, strict=True):
        assert torch.equal(found.boxes, expected.boxes)
        assert torch.equal(found.labels, expected.labels)
        assert (found.image_id, found.orig_size) == (expected.image_id, expected.orig_size)
    # one tensor crosses, whatever the number of images
    assert isinstance(packed.pixels, torch.Tensor if num_before else SharedPixels)
    assert not any(isinstance(value, torch.Tensor) for value in (packed.sizes, *packed.targets[0]))
