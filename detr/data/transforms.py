"""Augmentation and resizing of images with their boxes.

All randomness comes from torch's global CPU generator, which the loader seeds for each sample. Boxes are
(x0, y0, x1, y1) in pixels; sizes are (h, w).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from detr.data.steps import (
    Boxes,
    Chain,
    ImageWithBoxes,
    JitterScale,
    Labels,
    OneOf,
    RandomFlip,
    RandomSizeCrop,
    RandomWindow,
    ResizeExactly,
    ResizeShortSide,
    Step,
    TorchvisionStep,
    kept_boxes,
)


class DetectionTransform:
    """Applies steps in turn and keeps the boxes that still have an area.

    Boxes are clipped to the image; those with w <= 0 or h <= 0 go, along with their labels. There is no
    threshold on area or visibility, and no box at all may be left (recipe section 7).

    Args:
        steps: Steps of this package, or transforms of torchvision.transforms.v2 that take an image and its boxes.
            None at all keeps every image as it is.
    """

    def __init__(self, steps: Sequence[Step | v2.Transform]) -> None:
        self.steps: tuple[Step, ...] = tuple(
            TorchvisionStep(step) if isinstance(step, v2.Transform) else step for step in steps
        )

    def __call__(
        self, image: Tensor, boxes: Tensor, labels: Tensor, batch_draw: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Transform one image.

        Args:
            image: (3, h, w) uint8 RGB.
            boxes: (T, 4) float32 (x0, y0, x1, y1) in pixels.
            labels: (T,) int64.
            batch_draw: See `Step`.

        Returns:
            The same three of the transformed image; T may have become smaller.
        """
        image, found_boxes, found_labels = self.apply(image, boxes.numpy(), labels.numpy(), batch_draw)
        return image, torch.from_numpy(found_boxes), torch.from_numpy(found_labels)

    def apply(self, image: Tensor, boxes: Boxes, labels: Labels, batch_draw: float | None) -> ImageWithBoxes:
        """The same with boxes and labels as arrays."""
        for step in self.steps:
            image, boxes, labels = step(image, boxes, labels, batch_draw)
        return image, *kept_boxes(boxes, labels, h=image.shape[1], w=image.shape[2])


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
            super().__init__([ResizeExactly(size)])
        self.size = size if isinstance(size, int) or size is None else tuple(size)
        self.max_size = max_size

    def describe(self) -> dict[str, Any]:
        """The arguments as plain values, for a checkpoint: `EvalTransform(**described)` is this one again."""
        return {"size": list(self.size) if isinstance(self.size, tuple) else self.size, "max_size": self.max_size}


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
    crop = Chain([ResizeShortSide(crop_source_sizes, one_a_batch=False), RandomSizeCrop(*crop_sizes), final_resize])
    return DetectionTransform([RandomFlip(flip_probability), OneOf([final_resize, crop])])


def flip_and_resize(
    size: int | Sequence[int] | None, max_size: int | None = None, flip_probability: float = 0.5
) -> DetectionTransform:
    """A horizontal flip and the resizing of `EvalTransform`, for training."""
    resize = EvalTransform(size, max_size)
    return DetectionTransform([RandomFlip(flip_probability), *resize.steps])


def large_scale_jitter(
    size: int | Sequence[int],
    scale_range: tuple[float, float] = (0.1, 2.0),
    flip_probability: float = 0.5,
    vertical_flip_probability: float = 0.0,
) -> DetectionTransform:
    """Large-scale jittering (Copy-Paste paper): fit into a window, scale at random, crop what reaches beyond it.

    Args:
        size: The side of a square window in pixels, or its (h, w); images become at most so large.
        scale_range: The least and the largest scale relative to the size that fits.
        flip_probability: How often to mirror left and right.
        vertical_flip_probability: How often to mirror top and bottom, for images that have no upright.

    Raises:
        ValueError: A value is out of range.
    """
    if not isinstance(size, int) and len(size) != 2:
        raise ValueError(f"size must be the side of a square or (h, w) in pixels; got {list(size)}")
    window = (size, size) if isinstance(size, int) else (size[0], size[1])
    flips: list[Step] = [RandomFlip(flip_probability)]
    if vertical_flip_probability:
        flips.append(RandomFlip(vertical_flip_probability, vertical=True))
    return DetectionTransform([*flips, JitterScale(window, scale_range), RandomWindow(window)])


def strong_augmentation(
    sizes: Sequence[int],
    max_size: int | None,
    photometric_probability: float = 0.5,
    zoom_out_probability: float = 0.5,
    iou_crop_probability: float = 0.8,
    flip_probability: float = 0.5,
) -> DetectionTransform:
    """The augmentation of SSD, as RT-DETR trains with it: colours, zooming out, crops that keep boxes, a flip.

    A crop drops the boxes whose centre it does not hold.

    Args:
        sizes: Short sides of the result in pixels to draw from.
        max_size: The limit of its long side in pixels.
        photometric_probability: How often each change of brightness, contrast, saturation, hue and channels.
        zoom_out_probability: How often to put the image somewhere in a black one of up to four times the sides.
        iou_crop_probability: How often to crop.
        flip_probability: How often to flip.
    """
    crop = v2.RandomApply([v2.RandomIoUCrop()], p=iou_crop_probability)
    return DetectionTransform(
        [
            v2.RandomPhotometricDistort(p=photometric_probability),
            v2.RandomZoomOut(p=zoom_out_probability),
            TorchvisionStep(crop, needs_boxes=True),
            RandomFlip(flip_probability),
            ResizeShortSide(sizes, max_size),
        ]
    )
