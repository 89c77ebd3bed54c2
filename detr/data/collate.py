"""Samples to a batch."""

from collections.abc import Sequence

from detr.data.dataset import Sample
from detr.structures import Batch, ImageBatch


def collate(samples: Sequence[Sample], pad_to: int) -> Batch:
    """Pad the images of `samples` to one size and put their targets beside them.

    Args:
        samples: N images (3, h, w) uint8 RGB with their targets.
        pad_to: Round the padded height and width up to a multiple of this many pixels.
    """
    images = ImageBatch.from_images([image for image, _ in samples], pad_to=pad_to)
    return Batch(images=images, targets=tuple(target for _, target in samples))
