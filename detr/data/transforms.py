"""Augmentation and resizing of images with their boxes, on torchvision.transforms.v2.

All randomness comes from torch's global CPU generator, which the loader seeds for each sample. Boxes are
(x0, y0, x1, y1) in pixels; sizes are (h, w).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F


class DetectionTransform:
    """Applies steps of torchvision.transforms.v2 in turn and keeps the boxes that still have an area.

    Boxes are clipped to the image; those with w <= 0 or h <= 0 go, along with their labels. There is no
    threshold on area or visibility, and no box at all may be left (recipe section 7).

    Args:
        steps: Transforms that take an image and its boxes. None at all keeps every image as it is.
    """

    def __init__(self, steps: Sequence[v2.Transform]) -> None:
        self.steps = tuple(steps)

    def __call__(self, image: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform one image.

        Args:
            image: (3, h, w) uint8 RGB.
            boxes: (T, 4) float32 (x0, y0, x1, y1) in pixels.
            labels: (T,) int64.

        Returns:
            The same three of the transformed image; T may have become smaller.
        """
        image = tv_tensors.Image(image)
        boxes = tv_tensors.BoundingBoxes(
            boxes, format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=(image.shape[1], image.shape[2])
        )
        for step in self.steps:
            image, boxes, labels = step(image, boxes, labels)
        image = image.as_subclass(Tensor)
        boxes, kept = clip_boxes(boxes.as_subclass(Tensor), h=image.shape[1], w=image.shape[2])
        return image, boxes[kept], labels[kept]


class EvalTransform(DetectionTransform):
    """The resizing that evaluation and prediction use; it draws no random numbers.

    Args:
        size: The short side in pixels, or the exact (h, w) of every image, which stretches it, or None to keep
            each image's size.
        max_size: The limit of the long side in pixels, for a short-side size only. None: no limit.

    Raises:
        ValueError: `max_size` is given without a short side.
    """

    def __init__(self, size: int | Sequence[int] | None = 800, max_size: int | None = 1333) -> None:
        if isinstance(size, int):
            super().__init__([ResizeShortSide([size], max_size)])
        elif max_size is not None:
            raise ValueError(
                f"max_size={max_size} limits the long side of images resized by their short side; with "
                f"size={size} it must be null"
            )
        elif size is None:
            super().__init__([])
        else:
            super().__init__([_exact_resize(size)])
        self.size = size if isinstance(size, int) or size is None else tuple(size)
        self.max_size = max_size

    def describe(self) -> dict[str, Any]:
        """The arguments as plain values, for a checkpoint: `EvalTransform(**described)` is this one again."""
        return {"size": list(self.size) if isinstance(self.size, tuple) else self.size, "max_size": self.max_size}


class ResizeShortSide(v2.Transform):
    """Resizes so that the short side has one of `sizes` pixels, drawn at random (recipe section 7).

    Bilinear with antialiasing, in uint8. The boxes are scaled by the ratio of the whole-pixel sides.

    Args:
        sizes: Short sides in pixels to draw from.
        max_size: The limit of the long side in pixels, kept to within one pixel. None: no limit.
    """

    def __init__(self, sizes: Sequence[int], max_size: int | None = None) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes must be short sides of at least 1 pixel; got {list(sizes)}")
        if max_size is not None and max_size < max(sizes):
            raise ValueError(
                f"max_size={max_size} is below the short side {max(sizes)}, which no image could then have. "
                "Raise max_size or lower the sizes"
            )
        self.sizes = tuple(sizes)
        self.max_size = max_size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        size = self.sizes[0] if len(self.sizes) == 1 else self.sizes[_random_index(len(self.sizes))]
        return {"size": resized_size(_image_size(flat_inputs), size, self.max_size)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.resize(inpt, list(params["size"]), antialias=True)


class RandomSizeCrop(v2.Transform):
    """Crops a window whose height and width are each drawn from min_size to min(side, max_size), inclusive.

    Args:
        min_size: The smallest side in pixels; a shorter side of the image is kept whole.
        max_size: The largest side in pixels.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        super().__init__()
        if not 1 <= min_size <= max_size:
            raise ValueError(f"needs 1 <= min_size <= max_size; got {min_size} and {max_size}")
        self.min_size = min_size
        self.max_size = max_size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        image_h, image_w = _image_size(flat_inputs)
        w, h = (_random_int(min(self.min_size, side), min(self.max_size, side)) for side in (image_w, image_h))
        return {"top": _random_int(0, image_h - h), "left": _random_int(0, image_w - w), "height": h, "width": w}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, **params)


def detr_augmentation(
    sizes: Sequence[int],
    max_size: int | None,
    crop_source_sizes: Sequence[int] = (400, 500, 600),
    crop_sizes: tuple[int, int] = (384, 600),
    flip_probability: float = 0.5,
) -> DetectionTransform:
    """The training augmentation of DETR and Deformable DETR (recipe section 7).

    A horizontal flip; then, with equal probability, a resize alone, or a resize, a crop and a resize.

    Args:
        sizes: Short sides of the result in pixels.
        max_size: The limit of its long side in pixels.
        crop_source_sizes: Short sides in pixels that an image has before it is cropped.
        crop_sizes: The smallest and the largest side of a crop in pixels.
        flip_probability: How often to flip.
    """
    final_resize = ResizeShortSide(sizes, max_size)
    crop = v2.Compose([ResizeShortSide(crop_source_sizes), RandomSizeCrop(*crop_sizes), final_resize])
    return DetectionTransform([v2.RandomHorizontalFlip(flip_probability), v2.RandomChoice([final_resize, crop])])


def flip_and_resize(
    size: int | Sequence[int] | None, max_size: int | None = None, flip_probability: float = 0.5
) -> DetectionTransform:
    """A horizontal flip and the resizing of `EvalTransform`, for training."""
    resize = EvalTransform(size, max_size)
    return DetectionTransform([v2.RandomHorizontalFlip(flip_probability), *resize.steps])


def resized_size(image_size: tuple[int, int], size: int, max_size: int | None) -> tuple[int, int]:
    """The (h, w) of an image whose short side becomes `size`: DETR's rule.

    Where the long side would exceed `max_size` the short side is round(max_size * short / long) instead. The
    long side is rounded down from the short one, and may so end one pixel above `max_size` (recipe section 7).
    """
    h, w = image_size
    short, long = min(h, w), max(h, w)
    if max_size is not None and long / short * size > max_size:
        # an image more than twice max_size times as long as it is wide would round to no pixels
        size = max(1, round(max_size * short / long))
    if short == size:
        return (h, w)
    long = int(size * long / short)
    return (size, long) if h < w else (long, size)


def clip_boxes(boxes: Tensor, *, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Boxes (T, 4) as (x0, y0, x1, y1) clipped to an image, and (T,) bool, which still have an area."""
    limits = torch.tensor([w, h, w, h], dtype=boxes.dtype)
    clipped = torch.minimum(boxes.clamp(min=0), limits)
    return clipped, (clipped[:, 2:] > clipped[:, :2]).all(1)


def _exact_resize(size: Sequence[int]) -> v2.Resize:
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"size must be a short side or (h, w) in pixels; got {list(size)}")
    return v2.Resize(list(size), antialias=True)


def _image_size(flat_inputs: list[Any]) -> tuple[int, int]:
    """(h, w) of the image among the inputs of a step."""
    for value in flat_inputs:
        if isinstance(value, tv_tensors.Image):
            return (value.shape[-2], value.shape[-1])
    raise ValueError("this transform needs a tv_tensors.Image among its inputs; found none")


def _random_index(length: int) -> int:
    return int(torch.randint(length, ()))


def _random_int(low: int, high: int) -> int:
    """A draw from low to high, both included."""
    return low + _random_index(high - low + 1)
