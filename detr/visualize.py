"""Pictures: boxes on images, contact sheets, and the curves of a run. Pillow and matplotlib's Figure, no pyplot."""

import colorsys
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib import font_manager, get_data_path
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.ops import box_convert

from detr.structures import Detections, Target
from detr.telemetry.loggers import read_metrics

# successive labels land far apart on the colour circle
_GOLDEN_RATIO = 0.618034
_DEFAULT_FONT = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def draw_boxes(
    image: Image.Image | Tensor,
    boxes: Tensor,
    labels: Sequence[int],
    *,
    names: Sequence[str],
    scores: Sequence[float] | None = None,
) -> Image.Image:
    """Draw boxes with class names, the first on top.

    Line width and letters follow the image size. Names may hold any script: a font of the machine that has the
    letters is looked for.

    Args:
        image: A Pillow image, or (3, h, w) uint8 RGB on the CPU; left as it is.
        boxes: (T, 4) floating, (x0, y0, x1, y1) in pixels of `image`, on the CPU. Parts outside the image are
            not drawn.
        labels: T class indices, rows of `names`.
        names: The name of each class.
        scores: T scores in [0, 1], written after the names; None for ground truth.

    Raises:
        ValueError: The numbers of boxes, labels and scores differ, a label has no name, or a box is not finite.
    """
    canvas = _as_pillow(image).convert("RGB")
    _check_boxes(boxes, labels, names, scores)
    draw = ImageDraw.Draw(canvas)
    short_side_px = min(canvas.size)
    line_px = max(1, round(short_side_px / 250))
    font_px = max(9, round(short_side_px / 40))
    for index in reversed(range(len(labels))):
        corners = _clip_to(canvas.size, boxes[index].tolist())
        if corners is None:
            continue
        name = names[labels[index]] or f"class {labels[index]}"
        text = name if scores is None else f"{name} {scores[index]:.2f}"
        color = label_color(labels[index])
        draw.rectangle(corners, outline=color, width=line_px)
        _draw_tag(draw, canvas.size, corners, text, color, font_px)
    return canvas


def draw_detections(
    image: Image.Image | Tensor, detections: Detections, names: Sequence[str], *, min_score: float = 0.3
) -> Image.Image:
    """Draw the detections of at least `min_score` on the original image; see :func:`draw_boxes`."""
    keep = detections.scores >= min_score
    return draw_boxes(
        image,
        detections.boxes[keep],
        detections.labels[keep].tolist(),
        names=names,
        scores=detections.scores[keep].tolist(),
    )


def draw_target(image: Image.Image | Tensor, target: Target, names: Sequence[str]) -> Image.Image:
    """Draw the ground truth on `image`, the original or a transformed one; see :func:`draw_boxes`."""
    canvas = _as_pillow(image)
    width_px, height_px = canvas.size
    scale_px = torch.tensor([width_px, height_px, width_px, height_px], dtype=torch.float32)
    boxes = box_convert(target.boxes.float(), "cxcywh", "xyxy") * scale_px  # (T, 4)
    return draw_boxes(canvas, boxes, target.labels.tolist(), names=names)


def draw_comparison(
    image: Image.Image | Tensor,
    target: Target,
    detections: Detections,
    names: Sequence[str],
    *,
    min_score: float = 0.3,
    side_px: int = 512,
) -> Image.Image:
    """The ground truth on the left, and the detections of at least `min_score` on the right.

    Args:
        image: The original or a resized one.
        target: Its ground truth.
        detections: In pixels of the original image, whose size `target` knows.
        names: The name of each class.
        min_score: Of the detections drawn.
        side_px: Longer side of each half; small images are made larger.
    """
    canvas = _fitted(_as_pillow(image), side_px)
    orig_height_px, orig_width_px = target.orig_size
    x_scale, y_scale = canvas.width / orig_width_px, canvas.height / orig_height_px
    scaled = Detections(
        detections.scores, detections.labels, detections.boxes * torch.tensor([x_scale, y_scale, x_scale, y_scale])
    )
    halves = [draw_target(canvas, target, names), draw_detections(canvas, scaled, names, min_score=min_score)]
    return contact_sheet(halves, num_columns=2, tile_px=side_px)


def contact_sheet(images: Sequence[Image.Image], *, num_columns: int = 4, tile_px: int = 320) -> Image.Image:
    """Images side by side in rows, each fitted into a square of `tile_px` without changing its shape.

    Raises:
        ValueError: There are no images, or a size is not positive.
    """
    if not images or num_columns < 1 or tile_px < 1:
        raise ValueError(
            f"a contact sheet needs images, a column and a size; got {len(images)} images, "
            f"num_columns={num_columns}, tile_px={tile_px}"
        )
    num_columns = min(num_columns, len(images))
    tiles = [_fitted(image.convert("RGB"), tile_px) for image in images]
    rows = [tiles[start : start + num_columns] for start in range(0, len(tiles), num_columns)]
    # a row is as high as its highest tile, so wide images leave no white stripes
    heights_px = [max(tile.height for tile in row) for row in rows]
    sheet = Image.new("RGB", (num_columns * tile_px, sum(heights_px)), "white")
    top = 0
    for row, height_px in zip(rows, heights_px, strict=True):
        for column, tile in enumerate(row):
            left = column * tile_px + (tile_px - tile.width) // 2
            sheet.paste(tile, (left, top + (height_px - tile.height) // 2))
        top += height_px
    return sheet


def _fitted(image: Image.Image, side_px: int) -> Image.Image:
    """As large as fits into a square; a side of an image that is very long the other way stays a pixel."""
    scale = side_px / max(image.size)
    return image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BICUBIC
    )


def plot_curves(metrics_path: Path | str, output_dir: Path | str) -> list[Path]:
    """Draw what a run logged: `loss.png` (total loss, its terms, learning rate) and `ap.png` (val/AP...).

    A picture without values is not written. Gaps mark values that were NaN or infinite, or had nothing to find.

    Args:
        metrics_path: A metrics.jsonl with the names train/loss, train/loss_*, train/lr and val/AP*.
        output_dir: Folder of the pictures; made if it does not exist.

    Returns:
        The files written.
    """
    rows = read_metrics(metrics_path)
    names = list(dict.fromkeys(name for row in rows for name in row))
    losses = [name for name in names if name == "train/loss" or name.startswith("train/loss_")]
    # the losses of single decoder layers and of the proposals would drown the rest
    losses = [name for name in losses if not name.rpartition("_")[2].isdecimal() and not name.endswith("_enc")]
    precisions = [name for name in names if name in ("val/AP", "val/AP50", "val/AP75")]
    sizes = [name for name in names if name in ("val/APs", "val/APm", "val/APl")]
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    written = []
    if losses:
        rates = [name for name in names if name == "train/lr"]
        figure = _figure_of_curves(rows, [("loss", losses, "log"), ("learning rate", rates, "linear")])
        written.append(_save_figure(figure, output_dir / "loss.png"))
    if precisions:
        figure = _figure_of_curves(rows, [("AP", precisions, "linear"), ("AP by size", sizes, "linear")])
        written.append(_save_figure(figure, output_dir / "ap.png"))
    return written


def label_color(label: int) -> tuple[int, int, int]:
    """The RGB colour of a class, the same in every picture."""
    hue = (label * _GOLDEN_RATIO) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75 if label % 2 else 0.95, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def _figure_of_curves(rows: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, Sequence[str], str]]) -> Figure:
    """One panel for each (title, names, y scale) that has names."""
    panels = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(6.4 * len(panels), 4.2), layout="constrained")
    for index, (title, names, scale) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), index)
        highest = 0.0
        for name in names:
            steps, values = _curve(rows, name)
            highest = max([highest, *(value for value in values if not math.isnan(value))])
            marker = "o" if len(steps) < 30 else None
            axes.plot(steps, values, label=name.partition("/")[2], marker=marker, markersize=3, linewidth=1.2)
        # a logarithmic axis needs something above zero
        if scale == "log" and highest > 0:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _curve(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one name; what is not there to draw (null, the -1 of an empty AP) is NaN."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    values = [math.nan if value is None or value < 0 else float(value) for _, value in points]
    return [step for step, _ in points], values


def _save_figure(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def _as_pillow(image: Image.Image | Tensor) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
        raise ValueError(
            f"image must be (3, h, w) uint8 RGB or a Pillow image; got {image.dtype} of shape {tuple(image.shape)}"
        )
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())  # (h, w, 3)


def _check_boxes(boxes: Tensor, labels: Sequence[int], names: Sequence[str], scores: Sequence[float] | None) -> None:
    T = len(labels)
    if boxes.shape != (T, 4) or (scores is not None and len(scores) != T):
        raise ValueError(
            f"boxes must be ({T}, 4) for {T} labels, with as many scores; got boxes of shape "
            f"{tuple(boxes.shape)} and {'no' if scores is None else len(scores)} scores"
        )
    if not bool(torch.isfinite(boxes).all()):
        raise ValueError("boxes must be finite (x0, y0, x1, y1) in pixels; found NaN or infinity")
    unnamed = [label for label in labels if not 0 <= label < len(names)]
    if unnamed:
        raise ValueError(f"label {unnamed[0]} has no name; {len(names)} names were given")


def _clip_to(size: tuple[int, int], box: Sequence[float]) -> tuple[float, float, float, float] | None:
    """The part of (x0, y0, x1, y1) inside an image of `size` (w, h) in pixels, or None outside of it."""
    right, bottom = size[0] - 1, size[1] - 1
    x0, y0, x1, y1 = box
    if x1 < x0 or y1 < y0 or x1 < 0 or y1 < 0 or x0 > right or y0 > bottom:
        return None
    return max(x0, 0), max(y0, 0), min(x1, right), min(y1, bottom)


def _draw_tag(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corners: tuple[float, float, float, float],
    text: str,
    color: tuple[int, int, int],
    font_px: int,
) -> None:
    """Write `text` on a plate above the box, or inside it at the top border of the image."""
    font = ImageFont.truetype(str(_font_path("".join(sorted(set(text))))), font_px)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    margin = max(1, font_px // 6)
    width, height = right - left + 2 * margin, bottom - top + 2 * margin
    x = max(0, min(corners[0], size[0] - width))
    y = corners[1] - height if corners[1] >= height else corners[1]
    draw.rectangle((x, y, x + width, y + height), fill=color)
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    ink = "black" if luminance > 140 else "white"
    draw.text((x + margin - left, y + margin - top), text, fill=ink, font=font)


@lru_cache(maxsize=256)
def _font_path(letters: str) -> Path:
    """A font with all `letters`: DejaVu Sans, which comes with matplotlib, else one of the machine's.

    Where no font has them all, DejaVu Sans draws boxes for what it lacks.
    """
    for path in [str(_DEFAULT_FONT), *sorted(font_manager.findSystemFonts())]:
        try:
            charmap = FT2Font(path).get_charmap()
        except (RuntimeError, OSError):
            # a broken font file on the machine is no reason to fail
            continue
        if all(ord(letter) in charmap for letter in letters):
            return Path(path)
    return _DEFAULT_FONT
