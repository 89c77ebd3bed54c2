"""The shapes of the synthetic dataset, as polygons, and how one is drawn."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

# masks are drawn this many times larger and averaged, which gives smooth edges
_SUPERSAMPLING = 4


@dataclass(frozen=True)
class Shape:
    """An outline within [-1, 1] x [-1, 1], x to the right and y down.

    Attributes:
        outline: (K, 2) corners (x, y).
        hole: (K', 2) corners of a hole, or None.
    """

    outline: NDArray[np.float64]
    hole: NDArray[np.float64] | None = None


def draw_mask(shape: Shape, *, side_px: float, aspect: float, angle: float) -> NDArray[np.uint8]:
    """The mask of a shape, cut to its extents: (h, w) uint8, 255 inside and less along the smooth edge.

    The first and last row and column each hold a pixel that is at least half covered.

    Args:
        shape: What to draw.
        side_px: The side of its [-1, 1] square in pixels.
        aspect: Width over height.
        angle: The rotation in radians.
    """
    stretch = np.sqrt(aspect)
    cos, sin = np.cos(angle), np.sin(angle)
    matrix = np.array([[cos, -sin], [sin, cos]]) * np.array([stretch, 1 / stretch]) * (side_px / 2)
    canvas_px = 2 * int(np.ceil(np.abs(shape.outline @ matrix.T).max())) + 2
    canvas = Image.new("L", (canvas_px * _SUPERSAMPLING, canvas_px * _SUPERSAMPLING))
    pen = ImageDraw.Draw(canvas)
    for polygon, value in ((shape.outline, 255), (shape.hole, 0)):
        if polygon is not None:
            corners = (polygon @ matrix.T + canvas_px / 2) * _SUPERSAMPLING
            pen.polygon(corners.ravel().tolist(), fill=value)
    mask = np.asarray(canvas.reduce(_SUPERSAMPLING))
    x0, y0, x1, y1 = mask_extents(mask)
    return mask[y0:y1, x0:x1]


def mask_extents(mask: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """The box (x0, y0, x1, y1) of the pixels of a mask (h, w) that are at least half covered, ends exclusive.

    All zero for a mask without any.
    """
    covered = mask >= 128
    columns, rows = np.flatnonzero(covered.any(0)), np.flatnonzero(covered.any(1))
    if not len(rows):
        return (0, 0, 0, 0)
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)


def _radial(num_corners: int, radii: tuple[float, ...] = (1.0,), turn: float = -0.25) -> NDArray[np.float64]:
    """Corners at equal angles whose distances from the centre repeat `radii`; `turn` is that of the first."""
    angles = 2 * np.pi * (np.arange(num_corners) / num_corners + turn)
    distances = np.resize(radii, num_corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * distances[:, None]


def _corners(*xy: tuple[float, float]) -> NDArray[np.float64]:
    return np.array(xy, dtype=np.float64)


def _crescent() -> NDArray[np.float64]:
    """The unit circle without a smaller one that meets it at the two tips."""
    tip = 0.3 * np.pi
    centre = 0.45
    radius = np.hypot(np.cos(tip) - centre, np.sin(tip))
    inner_tip = np.arctan2(np.sin(tip), np.cos(tip) - centre)
    outer = np.linspace(tip, 2 * np.pi - tip, 24)
    inner = np.linspace(2 * np.pi - inner_tip, inner_tip, 16)
    return np.concatenate(
        [
            np.stack([np.cos(outer), np.sin(outer)], axis=1),
            np.stack([centre + radius * np.cos(inner), radius * np.sin(inner)], axis=1),
        ]
    )


def _heart() -> NDArray[np.float64]:
    t = np.linspace(0, 2 * np.pi, 32, endpoint=False)
    x = np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)) / 15
    return np.stack([x, y - 0.1], axis=1)


SHAPES: dict[str, Shape] = {
    "circle": Shape(_radial(32)),
    "square": Shape(_corners((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))),
    "triangle": Shape(_corners((0, -1), (1, 0.85), (-1, 0.85))),
    "cross": Shape(
        _corners(
            *((-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)),
            *((0.33, 1), (-0.33, 1), (-0.33, 0.33), (-1, 0.33), (-1, -0.33), (-0.33, -0.33)),
        )
    ),
    "ring": Shape(_radial(32), hole=_radial(32) * 0.55),
    "star": Shape(_radial(10, radii=(1.1, 0.45))),
    "crescent": Shape(_crescent()),
    "diamond": Shape(_corners((0, -1.1), (0.75, 0), (0, 1.1), (-0.75, 0))),
    "heart": Shape(_heart()),
    "arrow": Shape(
        _corners((-1, -0.3), (0.1, -0.3), (0.1, -0.85), (1, 0), (0.1, 0.85), (0.1, 0.3), (-1, 0.3)),
    ),
    "hourglass": Shape(_corners((-0.85, -1), (0.85, -1), (0.15, 0), (0.85, 1), (-0.85, 1), (-0.15, 0))),
    "frame": Shape(
        _corners((-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95)),
        hole=_corners((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)),
    ),
    "house": Shape(
        _corners(
            *((0, -1), (0.95, -0.15), (0.65, -0.15), (0.65, 0.95)),
            *((-0.65, 0.95), (-0.65, -0.15), (-0.95, -0.15)),
        )
    ),
    "stairs": Shape(
        _corners(
            *((-1, -1), (-0.33, -1), (-0.33, -0.33), (0.33, -0.33)),
            *((0.33, 0.33), (1, 0.33), (1, 1), (-1, 1)),
        )
    ),
}
"""By name, in the order of their labels."""
