"""Samples to a batch, and a batch on its way from a data worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detr.data.dataset import Sample
from detr.structures import Batch, ImageBatch, Target


def collate(samples: Sequence[Sample], pad_to: int) -> Batch:
    """Pad the images of `samples` to one size and put their targets beside them.

    Args:
        samples: N images (3, h, w) uint8 RGB with their targets.
        pad_to: Round the padded height and width up to a multiple of this many pixels.
    """
    images = ImageBatch.from_images([image for image, _ in samples], pad_to=pad_to)
    return Batch(images=images, targets=tuple(target for _, target in samples))


@dataclass(frozen=True)
class PackedBatch:
    """A batch with as few tensors as can be, to be sent from one process to another.

    A tensor crosses as a file descriptor, which takes the main process longer than the few numbers of a box; arrays
    go with the message.

    Attributes:
        pixels: See `ImageBatch`.
        sizes: Likewise.
        targets: Labels, boxes, image id and original size of each image.
    """

    pixels: Tensor
    sizes: NDArray[np.int64]
    targets: tuple[tuple[NDArray[np.int64], NDArray[np.float32], int, tuple[int, int]], ...]

    @classmethod
    def pack(cls, batch: Batch) -> "PackedBatch":
        """`batch`, packed."""
        targets = tuple(
            (target.labels.numpy(), target.boxes.numpy(), target.image_id, target.orig_size) for target in batch.targets
        )
        return cls(batch.images.pixels, batch.images.sizes.numpy(), targets)

    def unpack(self) -> Batch:
        """The batch again."""
        images = ImageBatch(self.pixels, torch.from_numpy(self.sizes))
        targets = tuple(
            Target(torch.from_numpy(labels), torch.from_numpy(boxes), image_id, orig_size)
            for labels, boxes, image_id, orig_size in self.targets
        )
        return Batch(images=images, targets=targets)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; PyTorch's pinning thread calls this."""
        return self.unpack().pin_memory()
