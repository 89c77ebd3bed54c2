"""One HTML file that shows an analysis: tables, curves, confusions, and the images with most mistakes."""

import base64
import html
import io
import logging
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torchvision.transforms.functional import to_pil_image

from detr.engine.run_folder import write_json
from detr.evaluation import KINDS, Analysis, ClassAnalysis, Mistake
from detr.evaluation.analysis import RECALL_LEVELS
from detr.visualize import draw_boxes

_logger = logging.getLogger(__name__)

ReadImage = Callable[[str], torch.Tensor]

# more classes make the curves and the matrix unreadable: the ones with most objects are shown
_NUM_CURVES = 12
_NUM_CONFUSED = 30
# longer side of the images with mistakes: small ones are made larger, so that boxes and names have room
_LEAST_PICTURE_PX, _MOST_PICTURE_PX = 640, 960

_MEANINGS = {
    "duplicate": "finds an object that a better detection has found",
    "classification": "right place (IoU 0.5 and more), wrong class",
    "localisation": "right class, IoU 0.1 to 0.5",
    "both": "wrong class, IoU 0.1 to 0.5",
    "background": "overlaps nothing",
    "missed": "an object that none of the above is about",
}

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; }
.table { overflow-x: auto; }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; text-align: right; }
td:first-child, th:first-child, .text { text-align: left; }
th { background: #f4f4f4; }
h1, h3 { overflow-wrap: anywhere; }
img { max-width: 100%; }
.pair { display: flex; gap: 1rem; flex-wrap: wrap; margin-bottom: 1.4rem; }
.pair > * { margin: 0; flex: 1 1 20rem; min-width: 0; }
figure img { width: 100%; }
"""


def write_analysis(analysis: Analysis, folder: Path, *, title: str, read: ReadImage | None, num_worst: int = 12) -> str:
    """Write report.html and analysis.json to `folder`; returns what they come to, in two lines.

    Args:
        analysis: What to show.
        folder: Made if it does not exist.
        title: Of the page.
        read: See `write_report`.
        num_worst: Likewise.
    """
    path = folder / "report.html"
    write_report(analysis, path, title=title, read=read, num_worst=num_worst)
    write_json(folder / "analysis.json", analysis.to_dict())
    errors = analysis.errors
    kinds = ", ".join(f"{number} {kind}" for kind, number in errors.counts().items())
    return (
        f"AP {analysis.metrics.AP:.4f}; at a score of {errors.min_score:g}: {errors.num_correct} correct, {kinds}\n"
        f"wrote {path}; open it in a browser"
    )


def write_report(analysis: Analysis, path: Path, *, title: str, read: ReadImage | None, num_worst: int = 12) -> None:
    """Write the report to `path`, with every picture inside it.

    Args:
        analysis: What to show.
        path: An .html file; its folder is made.
        title: Of the page.
        read: Gives an image (3, h, w) uint8 RGB by its file name, for the images with most mistakes; None leaves them
            out.
        num_worst: How many of them.
    """
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        _summary(analysis),
        "<h2>Mistakes</h2>",
        _mistakes_table(analysis),
        "<h2>Classes</h2>",
        _classes_table(analysis.classes),
        "<h2>Precision over recall</h2>",
        '<div class="pair">',
        *(
            f"<div>{_picture(figure, f'precision over recall at IoU {iou}')}</div>"
            for iou, figure in _curves(analysis.classes).items()
        ),
        "</div>",
        "<h2>Confusion</h2>",
        f"<p>Detections of at least {analysis.errors.min_score:g}, paired with objects at IoU 0.5, whatever the class."
        "</p>",
        _picture(_confusion(analysis), "confusion matrix"),
    ]
    if read is not None:
        sections += ["<h2>Images with most mistakes</h2>", *_worst_images(analysis, read, num_worst)]
    body = "\n".join(sections)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _summary(analysis: Analysis) -> str:
    numbers = {name: None if value < 0 else value for name, value in analysis.metrics.numbers().items()}
    return (
        f"<p>{len(analysis.ground_truth.image_numbers)} images, {sum(each.num_objects for each in analysis.classes)} "
        f"objects, {len(analysis.detections)} detections. Numbers are in "
        "[0, 1]; - stands where there is nothing to find.</p>"
        + _table(list(numbers), [[_number(value) for value in numbers.values()]])
    )


def _mistakes_table(analysis: Analysis) -> str:
    errors = analysis.errors
    rows = [["correct", str(errors.num_correct), f"detections of at least {errors.min_score:g} that found an object"]]
    rows += [[kind, str(errors.counts()[kind]), _MEANINGS[kind]] for kind in KINDS]
    return _table(["kind", "number", "meaning"], rows, texts=("meaning",))


def _classes_table(classes: Sequence[ClassAnalysis]) -> str:
    rows = [
        [each.name, str(each.num_objects)]
        + [_number(value) for value in (each.AP, each.AP50, each.AP_small, each.AP_medium, each.AP_large)]
        for each in sorted(classes, key=lambda each: -1.0 if each.AP is None else -each.AP - 2.0)
    ]
    return _table(["class", "objects", "AP", "AP50", "AP small", "AP medium", "AP large"], rows)


def _curves(classes: Sequence[ClassAnalysis]) -> dict[str, Figure]:
    """Precision over recall by IoU: the classes with most objects, and the mean of all."""
    shown = [each for each in _most_frequent(classes, _NUM_CURVES) if each.AP is not None]
    present = [each for each in classes if each.AP is not None]
    figures = {}
    for column, iou in enumerate(("0.50", "0.75")):
        figures[iou] = figure = Figure(figsize=(5.5, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for each in shown:
            axes.plot(RECALL_LEVELS, each.precision[column], linewidth=1, label=each.name)
        if present:
            mean = np.mean([each.precision[column] for each in present], axis=0)
            axes.plot(RECALL_LEVELS, mean, color="black", linewidth=2.2, label="mean of all classes")
        axes.set(title=f"IoU {iou}", xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
        axes.grid(visible=True, alpha=0.3)
        if present:
            # curves leave this corner last
            axes.legend(fontsize="x-small", loc="lower left")
    return figures


def _confusion(analysis: Analysis) -> Figure:
    kept = sorted(analysis.classes.index(each) for each in _most_frequent(analysis.classes, _NUM_CONFUSED))
    rows = [*kept, len(analysis.classes)]
    counts = analysis.errors.confusion[np.ix_(rows, rows)]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = [analysis.classes[row].name for row in kept]
    side = max(4.0, 0.32 * len(rows) + 2)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(rows)), [*names, "missed"], rotation=90, fontsize="x-small")
    axes.set_yticks(range(len(rows)), [*names, "nothing"], fontsize="x-small")
    axes.set(xlabel="predicted", ylabel="true")
    for row, column in zip(*np.nonzero(counts), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6, color=color)
    return figure


def _worst_images(analysis: Analysis, read: ReadImage, num_worst: int) -> list[str]:
    """Pairs of pictures: the objects, and the detections that are wrong."""
    sections = []
    for number, num_mistakes in analysis.errors.worst_images(num_worst):
        name = analysis.file_names.get(number)
        if name is None:
            continue
        try:
            pixels = read(name)
        except (ValueError, OSError) as error:
            _logger.warning("the report leaves out %s: %s", name, error)
            continue
        mistakes = [each for each in analysis.errors.mistakes if each.image_number == number]
        found = [each for each in mistakes if each.kind != "missed"]
        missed = {(each.category_id, each.bbox) for each in mistakes if each.kind == "missed"}
        objects = [each for each in analysis.ground_truth.annotations if each["image_id"] == number]
        kinds = ", ".join(
            f"{sum(each.kind == kind for each in mistakes)} {kind}"
            for kind in KINDS
            if any(each.kind == kind for each in mistakes)
        )
        sections.append(
            f'<h3>{html.escape(name)}: {num_mistakes} mistakes ({kinds})</h3>\n<div class="pair">'
            + _figure("objects", _draw(analysis, pixels, objects, missed))
            + _figure("wrong detections", _draw(analysis, pixels, found, missed))
            + "</div>"
        )
    return sections or ["<p>None has a mistake, or their files were not found.</p>"]


def _draw(
    analysis: Analysis,
    pixels: torch.Tensor,
    entries: Sequence[Any],
    missed: Set[tuple[int, tuple[float, float, float, float]]],
) -> Image.Image:
    """Boxes of annotations or mistakes on an image of a size to look at; each box has its own colour and text.

    Args:
        analysis: Knows the names.
        pixels: (3, h, w) uint8, the image.
        entries: Annotations, or mistakes.
        missed: (category id, bbox) of the annotations that nothing found.
    """
    names_by_id = {each.category_id: each.name for each in analysis.classes}
    boxes, names = [], []
    for entry in entries:
        if isinstance(entry, Mistake):
            x, y, w, h = entry.bbox
            names.append(f"{names_by_id[entry.category_id]} {entry.score:.2f} {entry.kind}")
        else:
            x, y, w, h = entry["bbox"]
            is_missed = (entry["category_id"], tuple(entry["bbox"])) in missed
            names.append(names_by_id[entry["category_id"]] + (" missed" if is_missed else ""))
        boxes.append([x, y, x + w, y + h])
    height_px, width_px = pixels.shape[1:]
    side_px = min(max(height_px, width_px, _LEAST_PICTURE_PX), _MOST_PICTURE_PX)
    picture = ImageOps.contain(to_pil_image(pixels), (side_px, side_px))
    x_scale, y_scale = picture.width / width_px, picture.height / height_px
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    corners *= torch.tensor([x_scale, y_scale, x_scale, y_scale])
    return draw_boxes(picture, corners, list(range(len(names))), names=names)


def _most_frequent(classes: Sequence[ClassAnalysis], limit: int) -> list[ClassAnalysis]:
    return sorted(classes, key=lambda each: -each.num_objects)[:limit]


def _figure(caption: str, image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return f"<figure>{_inline(buffer.getvalue(), 'jpeg', caption)}<figcaption>{caption}</figcaption></figure>"


def _picture(figure: Figure, caption: str) -> str:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return _inline(buffer.getvalue(), "png", caption)


def _inline(content: bytes, kind: str, caption: str) -> str:
    return f'<img alt="{html.escape(caption)}" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[str] = ()) -> str:
    """A table of numbers, whose first column and those of `texts` are words."""
    classes = [' class="text"' if name in texts else "" for name in header]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(classes, header, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
