"""Samples to a batch, and a batch on its way from a data worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detr.data.dataset import Sample
from detr.data.recycled import ReceivedBuffers, SharedPixels, WorkerBuffers
from detr.data.shared_memory import new_shared_memory
from detr.structures import Batch, ImageBatch, Target


def collate(samples: Sequence[Sample], pad_to: int, *, allocate: Callable[[int], Tensor] | None = None) -> Batch:
    """Pad the images of `samples` to one size and put their targets beside them.

    Args:
        samples: N images (3, h, w) uint8 RGB with their targets.
        pad_to: Round the padded height and width up to a multiple of this many pixels.
        allocate: See `ImageBatch.from_images`.
    """
    images = ImageBatch.from_images([image for image, _ in samples], pad_to=pad_to, allocate=allocate)
    return Batch(images=images, targets=tuple(target for _, target in samples))


@dataclass(frozen=True)
class PackedBatch:
    """A batch with as few tensors as can be, to be sent from one process to another.

    A tensor crosses as a file descriptor, which takes the main process longer than the few numbers of a box; arrays
    go with the message.

    Attributes:
        pixels: See `ImageBatch`; or the buffer that they lie in.
        sizes: See `ImageBatch`.
        targets: Labels, boxes, image id and original size of each image.
    """

    pixels: Tensor | SharedPixels
    sizes: NDArray[np.int64]
    targets: tuple[tuple[NDArray[np.int64], NDArray[np.float32], int, tuple[int, int]], ...]

    @classmethod
    def pack(cls, samples: Sequence[Sample], pad_to: int, buffers: WorkerBuffers) -> "PackedBatch":
        """The batch of `samples`, padded into a buffer where one is free, else into shared memory of its own.

        Raises:
            OSError: There is no shared memory left.
        """
        slot: int | None = None

        def allocate(num_bytes: int) -> Tensor:
            nonlocal slot
            slot = buffers.take(num_bytes)
            return new_shared_memory(num_bytes) if slot is None else buffers.memory(slot)

        batch = collate(samples, pad_to, allocate=allocate)
        pixels: Tensor | SharedPixels = batch.images.pixels
        if slot is not None:
            N, _, H, W = batch.images.pixels.shape
            pixels = buffers.send(slot, (N, H, W))
        targets = tuple(
            (target.labels.numpy(), target.boxes.numpy(), target.image_id, target.orig_size) for target in batch.targets
        )
        return cls(pixels, batch.images.sizes.numpy(), targets)

    def unpack(self, buffers: ReceivedBuffers) -> Batch:
        """The batch again.

        Raises:
            MemoryError: A new buffer cannot be page-locked.
        """
        pixels = buffers.pixels(self.pixels) if isinstance(self.pixels, SharedPixels) else self.pixels
        targets = tuple(
            Target(torch.from_numpy(labels), torch.from_numpy(boxes), image_id, orig_size)
            for labels, boxes, image_id, orig_size in self.targets
        )
        return Batch(ImageBatch(pixels, torch.from_numpy(self.sizes)), targets)
