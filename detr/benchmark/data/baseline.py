"""The data pipeline that the other DETR codebases have, to compare ours with: Pillow, ToTensor, Normalize.

It draws the same random numbers as ours, so that both make the same sizes and crops of the same images.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from detr.data.steps import random_index, random_int, resized_size

_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class PillowPipeline:
    """JPEG file to a normalised float image under the augmentation of DETR (recipe section 7).

    Args:
        sizes: Short sides in pixels to draw from.
        max_size: The limit of the long side in pixels.
        crop_source_sizes: Short sides that an image has before it is cropped.
        crop_sizes: The smallest and the largest side of a crop.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_size: int,
        crop_source_sizes: Sequence[int] = (400, 500, 600),
        crop_sizes: tuple[int, int] = (384, 600),
    ) -> None:
        self.sizes = sizes
        self.max_size = max_size
        self.crop_source_sizes = crop_source_sizes
        self.crop_sizes = crop_sizes

    def __call__(self, path: Path) -> Tensor:
        """(3, h, w) float32, normalised."""
        with Image.open(path) as file:
            image = file.convert("RGB")
        if float(torch.rand(())) < 0.5:
            image = F.hflip(image)
        if random_index(2) == 1:
            image = self._resize(image, self.crop_source_sizes, None)
            low, high = self.crop_sizes
            w, h = (random_int(min(low, side), min(high, side)) for side in image.size)
            top, left = random_int(0, image.height - h), random_int(0, image.width - w)
            image = F.crop(image, top, left, h, w)
        image = self._resize(image, self.sizes, self.max_size)
        return F.normalize(F.to_tensor(image), _MEAN, _STD)

    def _resize(self, image: Image.Image, sizes: Sequence[int], max_size: int | None) -> Image.Image:
        size = sizes[random_index(len(sizes))]
        return F.resize(image, list(resized_size((image.height, image.width), size, max_size)))


def pad_floats(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch (N, 3, H, W) of float images, padded with 0, and its mask (N, H, W), True = padding."""
    H, W = (max(image.shape[side] for image in images) for side in (1, 2))
    pixels = torch.zeros((len(images), 3, H, W))
    mask = torch.ones((len(images), H, W), dtype=torch.bool)
    for image, padded, image_mask in zip(images, pixels, mask, strict=True):
        padded[:, : image.shape[1], : image.shape[2]].copy_(image)
        image_mask[: image.shape[1], : image.shape[2]] = False
    return pixels, mask
