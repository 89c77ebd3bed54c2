"""Single steps on an image and its boxes: flip, resize, crop, choices between them, torchvision's own.

Images are (3, h, w) uint8 RGB, boxes (T, 4) float32 (x0, y0, x1, y1) in pixels, sizes (h, w). All randomness comes
from torch's global CPU generator, which the loader seeds for each sample.

The geometric steps are written for speed: torchvision's wrapped tensors cost half as much as the resizing itself, and
so do torch's operators on a handful of boxes, which are numpy arrays here. Pixels stay interleaved in memory (R, G, B
of one pixel side by side), as the decoder gives them and as resizing and padding take them fastest.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision import tv_tensors
from torchvision.transforms import v2

Boxes = NDArray[np.float32]
Labels = NDArray[np.int64]
ImageWithBoxes = tuple[Tensor, Boxes, Labels]
"""Image, boxes, and their labels (T,) int64."""


class Step(Protocol):
    """What a transform is made of."""

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None, /) -> ImageWithBoxes:
        """Change one image.

        Args:
            image: (3, h, w) uint8 RGB.
            boxes: (T, 4) float32 (x0, y0, x1, y1) in pixels; may reach beyond the image.
            labels: (T,) int64.
            batch_draw: A random number in [0, 1) that all images of a batch share; None: each draws its own.
        """


class RandomFlip:
    """Mirrors left and right, or top and bottom.

    Args:
        probability: How often.
        vertical: Top and bottom change places: for images that have no upright, such as those of a microscope.
    """

    def __init__(self, probability: float = 0.5, *, vertical: bool = False) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"the probability of a flip must be in [0, 1]; got {probability}")
        self.probability = probability
        self.vertical = vertical

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        if float(torch.rand(())) >= self.probability:
            return image, boxes, labels
        # of the image (3, h, w), and of the coordinate in a box (x0, y0, x1, y1)
        dim, first = (1, 1) if self.vertical else (2, 0)
        mirrored = boxes.copy()
        mirrored[:, [first + 2, first]] = image.shape[dim] - boxes[:, [first, first + 2]]
        return image.flip(dim), mirrored, labels


class ResizeShortSide:
    """Resizes so that the short side has one of `sizes` pixels, drawn at random (recipe section 7).

    Bilinear with antialiasing, in uint8. The boxes are scaled by the ratio of the whole-pixel sides.

    Args:
        sizes: Short sides in pixels to draw from.
        max_size: The limit of the long side in pixels, kept to within one pixel. None: no limit.
        one_a_batch: Whether the images of a batch share their size where the loader lets them.
    """

    def __init__(self, sizes: Sequence[int], max_size: int | None = None, *, one_a_batch: bool = True) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes must be short sides of at least 1 pixel; got {list(sizes)}")
        if max_size is not None and max_size < max(sizes):
            raise ValueError(
                f"max_size={max_size} is below the short side {max(sizes)}, which no image could then have. "
                "Raise max_size or lower the sizes"
            )
        self.sizes = tuple(sizes)
        self.max_size = max_size
        self.one_a_batch = one_a_batch

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        if len(self.sizes) == 1:
            size = self.sizes[0]
        elif batch_draw is not None and self.one_a_batch:
            size = self.sizes[int(batch_draw * len(self.sizes))]
        else:
            size = self.sizes[random_index(len(self.sizes))]
        return resize(image, boxes, labels, resized_size(image_size(image), size, self.max_size))


class ResizeExactly:
    """Stretches every image to one size.

    Args:
        size: (h, w) in pixels.
    """

    def __init__(self, size: Sequence[int]) -> None:
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size must be a short side or (h, w) in pixels; got {list(size)}")
        self.size = (size[0], size[1])

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        return resize(image, boxes, labels, self.size)


class JitterScale:
    """Fits an image into `size`, and makes it larger or smaller by a random factor.

    Args:
        size: (h, w) in pixels; the image has its shape, as large as fits, at scale 1.
        scale_range: The least and the largest factor, all equally likely.
    """

    def __init__(self, size: tuple[int, int], scale_range: tuple[float, float]) -> None:
        low, high = scale_range
        if not 0 < low <= high:
            raise ValueError(f"needs 0 < low <= high for scale_range; got {list(scale_range)}")
        if min(size) < 1:
            raise ValueError(f"size must be at least 1 pixel high and wide; got {list(size)}")
        self.size = size
        self.low, self.high = low, high

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        h, w = image_size(image)
        scale = self.low + float(torch.rand(())) * (self.high - self.low)
        scale *= min(self.size[0] / h, self.size[1] / w)
        return resize(image, boxes, labels, (max(1, round(h * scale)), max(1, round(w * scale))))


class RandomWindow:
    """Cuts a window of `size` out of an image at a random place; a side that is shorter stays whole.

    Args:
        size: (h, w) in pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        image_h, image_w = image_size(image)
        return crop(image, boxes, labels, h=min(self.size[0], image_h), w=min(self.size[1], image_w))


class RandomSizeCrop:
    """Crops a window whose height and width are each drawn from min_size to min(side, max_size), inclusive.

    Args:
        min_size: The smallest side in pixels; a shorter side of the image is kept whole.
        max_size: The largest side in pixels.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        if not 1 <= min_size <= max_size:
            raise ValueError(f"needs 1 <= min_size <= max_size; got {min_size} and {max_size}")
        self.min_size = min_size
        self.max_size = max_size

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        image_h, image_w = image_size(image)
        w, h = (random_int(min(self.min_size, side), min(self.max_size, side)) for side in (image_w, image_h))
        return crop(image, boxes, labels, h=h, w=w)


class Chain:
    """Several steps, one after the other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        for step in self.steps:
            image, boxes, labels = step(image, boxes, labels, batch_draw)
        return image, boxes, labels


class OneOf:
    """One of several steps, each as often as the others."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        return self.steps[random_index(len(self.steps))](image, boxes, labels, batch_draw)


class TorchvisionStep:
    """A transform of torchvision.transforms.v2.

    Args:
        transform: Takes an image, boxes and labels.
        needs_boxes: Leave images without boxes as they are.
    """

    def __init__(self, transform: v2.Transform, *, needs_boxes: bool = False) -> None:
        self.transform = transform
        self.needs_boxes = needs_boxes

    def __call__(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        if self.needs_boxes and len(boxes) == 0:
            return image, boxes, labels
        wrapped_boxes = tv_tensors.BoundingBoxes(
            torch.from_numpy(boxes), format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=image_size(image)
        )
        image, wrapped_boxes, label_tensor = self.transform(
            tv_tensors.Image(image), wrapped_boxes, torch.from_numpy(labels)
        )
        return image.as_subclass(Tensor), wrapped_boxes.as_subclass(Tensor).numpy(), label_tensor.numpy()


def crop(image: Tensor, boxes: Boxes, labels: Labels, *, h: int, w: int) -> ImageWithBoxes:
    """A random window of an image that is at least h x w, and the boxes that still have an area in it."""
    image_h, image_w = image_size(image)
    top, left = random_int(0, image_h - h), random_int(0, image_w - w)
    boxes = boxes - np.array([left, top, left, top], dtype=np.float32)
    return image[:, top : top + h, left : left + w], *kept_boxes(boxes, labels, h=h, w=w)


def resize(image: Tensor, boxes: Boxes, labels: Labels, size: tuple[int, int]) -> ImageWithBoxes:
    """An image of `size` (h, w) with its boxes: bilinear, antialiased, in uint8.

    At most 1 of 255 off Pillow's bilinear resize of the same image, which the original training uses.
    """
    h, w = image_size(image)
    if size == (h, w):
        return image, boxes, labels
    # with the batch dimension in front of the interleaved image torch sees, and keeps, the memory layout
    batch = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)  # (3, h, w) -> (1, 3, h, w)
    resized = interpolate(batch, size=size, mode="bilinear", antialias=True)[0]
    return resized, boxes * np.array([size[1] / w, size[0] / h] * 2, dtype=np.float32), labels


def resized_size(size_before: tuple[int, int], size: int, max_size: int | None) -> tuple[int, int]:
    """The (h, w) of an image whose short side becomes `size`: DETR's rule.

    Where the long side would exceed `max_size` the short side is round(max_size * short / long) instead. The
    long side is rounded down from the short one, and may so end one pixel above `max_size` (recipe section 7).
    """
    h, w = size_before
    short, long = min(h, w), max(h, w)
    if max_size is not None and long / short * size > max_size:
        # an image more than twice max_size times as long as it is wide would round to no pixels
        size = max(1, round(max_size * short / long))
    if short == size:
        return (h, w)
    long = int(size * long / short)
    return (size, long) if h < w else (long, size)


def clip_boxes(boxes: Boxes, *, h: int, w: int) -> tuple[Boxes, NDArray[np.bool_]]:
    """Boxes (T, 4) as (x0, y0, x1, y1) clipped to an image, and (T,) bool, which still have an area."""
    clipped = np.minimum(np.maximum(boxes, np.float32(0)), np.array([w, h, w, h], dtype=np.float32))
    return clipped, np.all(clipped[:, 2:] > clipped[:, :2], axis=1)


def kept_boxes(boxes: Boxes, labels: Labels, *, h: int, w: int) -> tuple[Boxes, Labels]:
    """The boxes that have an area within an image, clipped to it, and their labels."""
    boxes, kept = clip_boxes(boxes, h=h, w=w)
    return (boxes, labels) if kept.all() else (boxes[kept], labels[kept])


def image_size(image: Tensor) -> tuple[int, int]:
    """(h, w) of an image (3, h, w)."""
    return (image.shape[1], image.shape[2])


def random_index(length: int) -> int:
    """A draw from 0 to length - 1."""
    return int(torch.randint(length, ()))


def random_int(low: int, high: int) -> int:
    """A draw from low to high, both included."""
    return low + random_index(high - low + 1)
