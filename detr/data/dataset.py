"""What every dataset here offers, and the last step they share: an image and its boxes become a sample."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detr.data.steps import Boxes, Labels
from detr.data.transforms import DetectionTransform
from detr.structures import ClassTable, Target

Sample = tuple[Tensor, Target]
"""An image (3, h, w) uint8 RGB and its target."""


class DetectionDataset(Protocol):
    """Samples by index, whose ground truth the COCO evaluator can read."""

    @property
    def class_table(self) -> ClassTable:
        """The classes, by label."""

    def __len__(self) -> int:
        """The number of images."""

    def load(self, index: int, batch_draw: float | None, /) -> Sample:
        """Image `index` with its target, transformed. Draws from the global RNGs only.

        Args:
            index: Which one.
            batch_draw: See `detr.data.steps.Step`.
        """

    def original(self, file_name: str, /) -> Tensor:
        """(3, h, w) uint8 RGB: the image that the ground truth calls `file_name`, before any transform.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no image.
        """

    def aspects(self) -> NDArray[np.float64]:
        """(I,) width / height of every image."""

    def repeat_factors(self, threshold: float, /) -> NDArray[np.float64]:
        """(I,) how often each image should come in an epoch; see `detr.data.epoch_order.repeat_factors`."""

    def coco_ground_truth(self) -> dict[str, Any]:
        """All annotations as a COCO dict, crowds included, annotation ids from 1."""


def make_sample(
    image: Tensor,
    boxes: Boxes,
    labels: Labels,
    *,
    image_id: int,
    transforms: DetectionTransform,
    batch_draw: float | None = None,
) -> Sample:
    """Transform an image with its boxes and describe the result as a target.

    Args:
        image: (3, h, w) uint8 RGB, as in the file.
        boxes: (T, 4) float32 (x0, y0, x1, y1) in pixels of that image.
        labels: (T,) int64.
        image_id: The id in the annotation file.
        transforms: What to do with them.
        batch_draw: See `detr.data.steps.Step`.
    """
    orig_size = (image.shape[1], image.shape[2])
    image, boxes, labels = transforms.apply(image, boxes, labels, batch_draw)
    h, w = image.shape[1:]
    # (x0, y0, x1, y1) -> (cx, cy, w, h)
    boxes = np.concatenate(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]), axis=1)
    return image, Target(
        labels=torch.from_numpy(labels),
        boxes=torch.from_numpy(boxes / np.array([w, h, w, h], dtype=np.float32)),
        image_id=image_id,
        orig_size=orig_size,
    )
