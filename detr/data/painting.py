"""Backgrounds and surfaces of the synthetic dataset, as planes (3, h, w) of float RGB in [0, 255]."""

import colorsys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Pixels = NDArray[np.float32]


def paint_background(random: np.random.Generator, size: int) -> Pixels:
    """A greyish scene (3, size, size): clouds of several scales, sometimes stripes, grain, thin lines."""
    base = _colour(random, hue=random.random(), saturation=random.uniform(0, 0.25), value=random.uniform(0.2, 0.85))
    texture = random.standard_normal((size, size), dtype=np.float32)
    texture *= np.float32(random.uniform(1, 8))
    for cells, strength in ((2, 35), (6, 22), (20, 12)):
        texture += _clouds(random, size, cells) * np.float32(strength * random.random())
    if random.random() < 0.4:
        stripes = _stripes(random, size, size, period_px=random.uniform(5, 30))
        texture += stripes * np.float32(random.uniform(4, 16))
    pixels = texture + base
    _paint_lines(random, pixels)
    return pixels


def paint_object(
    random: np.random.Generator, window: Pixels, mask: NDArray[np.uint8], *, hue: float, pattern: int
) -> None:
    """Paint a shape over the window of the image that it fills.

    Args:
        random: Where the variation comes from.
        window: (3, h, w), written in place.
        mask: (h, w) uint8, 255 inside the shape.
        hue: The colour in [0, 1), varied a little.
        pattern: Chooses one of four surfaces: plain, stripes, checks, rings.
    """
    h, w = mask.shape
    colour = _colour(
        random,
        hue=hue + random.normal(0, 0.025),
        saturation=random.uniform(0.55, 1.0),
        value=random.uniform(0.6, 1.0),
    )
    y = np.arange(h, dtype=np.float32)[:, None]
    x = np.arange(w, dtype=np.float32)
    frequency = np.float32(2 * np.pi / random.uniform(5, 9))
    surfaces = (
        lambda: np.ones((h, w), dtype=np.float32),
        lambda: _stripes(random, h, w, period_px=random.uniform(5, 9)),
        lambda: np.sign(np.sin(frequency * x) * np.sin(frequency * y)),
        lambda: np.sin(frequency * np.hypot(x - w / 2, y - h / 2)),
    )
    shade = 1 + np.float32(0.18) * surfaces[pattern % len(surfaces)]()
    # light falls from one side
    direction = random.uniform(0, 2 * np.pi)
    shade *= 1 + np.float32(0.2 * np.cos(direction)) * (x / w - 0.5)
    shade *= 1 + np.float32(0.2 * np.sin(direction)) * (y / h - 0.5)
    grain = random.standard_normal((h, w), dtype=np.float32) * np.float32(random.uniform(1, 6))
    painted = shade * colour + grain
    opacity = mask.astype(np.float32) / 255
    window += (painted - window) * opacity


def _colour(random: np.random.Generator, *, hue: float, saturation: float, value: float) -> Pixels:
    rgb = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return np.array(rgb, dtype=np.float32)[:, None, None] * 255  # (3, 1, 1)


def _clouds(random: np.random.Generator, size: int, cells: int) -> Pixels:
    """(size, size) smooth noise, about -1 to 1, with `cells` cells across."""
    coarse = random.uniform(-1, 1, (cells + 1, cells + 1)).astype(np.float32)
    position = np.linspace(0, cells, size, endpoint=False, dtype=np.float32)
    cell = position.astype(np.int64)
    step = position - cell
    share = step * step * (3 - 2 * step)
    rows = coarse[cell] + share[:, None] * (coarse[cell + 1] - coarse[cell])  # (size, cells + 1)
    # differences of the few columns first: those of all pixels would cost most of an image's time
    noise = np.take(rows[:, 1:] - rows[:, :-1], cell, axis=1)  # (size, size)
    noise *= share
    noise += np.take(rows, cell, axis=1)
    return noise


def _stripes(random: np.random.Generator, h: int, w: int, *, period_px: float) -> Pixels:
    """(h, w) stripes in a random direction, -1 to 1."""
    angle, phase = random.uniform(0, np.pi), random.uniform(0, 2 * np.pi)
    frequency = 2 * np.pi / period_px
    across = np.arange(w, dtype=np.float32) * np.float32(frequency * np.cos(angle))
    down = np.arange(h, dtype=np.float32) * np.float32(frequency * np.sin(angle)) + np.float32(phase)
    return np.sin(down[:, None] + across)


def _paint_lines(random: np.random.Generator, pixels: Pixels) -> None:
    """Draw up to four thin greyish lines over `pixels` (3, h, w), in place: clutter that is no object."""
    _, h, w = pixels.shape
    canvas = Image.new("L", (w, h))
    pen = ImageDraw.Draw(canvas)
    colours = np.zeros((3, 5), dtype=np.float32)
    for line in range(1, int(random.integers(1, 6))):
        ends = random.uniform(-0.2, 1.2, 4) * (w, h, w, h)
        pen.line(ends.tolist(), fill=line, width=int(random.integers(1, 4)))
        colours[:, line : line + 1] = _colour(
            random, hue=random.random(), saturation=random.uniform(0, 0.3), value=random.uniform(0.1, 0.9)
        )[:, :, 0]
    lines = np.asarray(canvas)
    y, x = np.nonzero(lines)
    pixels[:, y, x] += np.float32(0.7) * (colours[:, lines[y, x]] - pixels[:, y, x])
