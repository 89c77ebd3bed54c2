"""Where the shapes of a synthetic image go: partly over each other, but never too hidden to be found."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detr.data.shapes import mask_extents

# a shape must keep this share of its area within the image, and uncovered by the shapes drawn after it
MIN_VISIBLE_SHARE = 0.65

_NUM_ATTEMPTS = 12


@dataclass(frozen=True)
class PlacedShape:
    """A shape at its place.

    Attributes:
        label: What it is.
        mask: (h, w) uint8, 255 inside, cut to its box.
        x: Left edge of the mask in the image, in pixels.
        y: Top edge.
    """

    label: int
    mask: NDArray[np.uint8]
    x: int
    y: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(x0, y0, x1, y1) in pixels, ends exclusive: exactly the pixels that are at least half covered."""
        return (self.x, self.y, self.x + self.mask.shape[1], self.y + self.mask.shape[0])


class Scene:
    """The shapes placed in an image of size x size pixels so far.

    Attributes:
        shapes: In the order they are drawn.
    """

    def __init__(self, size: int) -> None:
        self.shapes: list[PlacedShape] = []
        self._size = size
        # which shape each pixel shows: 0 none, k the k-th placed
        self._shown = np.zeros((size, size), dtype=np.uint8)
        self._areas: list[int] = []
        self._visible_areas: list[int] = []

    def place(self, random: np.random.Generator, label: int, mask: NDArray[np.uint8]) -> bool:
        """Put a shape at a random place where it hides too much of nothing.

        Returns:
            Whether a place was found.
        """
        area = int((mask >= 128).sum())
        h, w = mask.shape
        for _ in range(_NUM_ATTEMPTS):
            # up to a quarter of each side may be outside
            x = int(random.integers(-(w // 4), self._size - w + w // 4 + 1))
            y = int(random.integers(-(h // 4), self._size - h + h // 4 + 1))
            shape = self._cut_to_image(PlacedShape(label, mask, x, y))
            covered = shape.mask >= 128
            if covered.sum() >= MIN_VISIBLE_SHARE * area and self._draw(shape, covered):
                return True
        return False

    def _cut_to_image(self, shape: PlacedShape) -> PlacedShape:
        left, top = max(0, -shape.x), max(0, -shape.y)
        inside = shape.mask[top : self._size - shape.y, left : self._size - shape.x]
        x0, y0, x1, y1 = mask_extents(inside)
        return PlacedShape(shape.label, inside[y0:y1, x0:x1], shape.x + left + x0, shape.y + top + y0)

    def _draw(self, shape: PlacedShape, covered: NDArray[np.bool_]) -> bool:
        """Mark the pixels of a shape as its own, unless that hides too much of an earlier one."""
        x0, y0, x1, y1 = shape.box
        window = self._shown[y0:y1, x0:x1]
        hidden = np.bincount(window[covered], minlength=len(self.shapes) + 1)[1:].tolist()
        left = [visible - lost for visible, lost in zip(self._visible_areas, hidden, strict=True)]
        if any(visible < MIN_VISIBLE_SHARE * area for visible, area in zip(left, self._areas, strict=True)):
            return False
        self.shapes.append(shape)
        window[covered] = len(self.shapes)
        area = int(covered.sum())
        self._areas.append(area)
        self._visible_areas = [*left, area]
        return True
