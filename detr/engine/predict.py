"""Detections on image files that belong to no dataset."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detr.data import EvalTransform, read_image
from detr.engine.evaluate import detect
from detr.engine.precision import Precision
from detr.engine.run_folder import PREDICTIONS, write_json
from detr.evaluation import PostProcess, to_results
from detr.structures import Batch, ClassTable, Detections, ImageBatch, Target
from detr.visualize import draw_detections

_logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".mpo", ".ppm", ".pgm")
)


@dataclass(frozen=True)
class Prediction:
    """What was found on one image.

    Attributes:
        path: The file.
        image: (3, h, w) uint8 RGB, as read.
        detections: In pixels of `image`, best first.
    """

    path: Path
    image: Tensor
    detections: Detections


def find_images(source: str | Path) -> list[Path]:
    """The image file `source`, or those directly in the folder `source`, by name.

    Raises:
        FileNotFoundError: There is neither.
        ValueError: The folder holds no image.
    """
    source = Path(source).expanduser()
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"source={source} is neither an image nor a folder; check the path")
    paths = sorted(path for path in source.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise ValueError(
            f"source={source} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}); give a folder of images"
        )
    return paths


def predict(
    model: nn.Module,
    paths: Iterable[Path],
    postprocess: PostProcess,
    *,
    preprocessing: Mapping[str, Any],
    min_score: float,
    batch_size: int,
    precision: Precision,
    device: torch.device,
) -> Iterator[Prediction]:
    """Detect on image files, in order. A file that cannot be read is reported and left out.

    Args:
        model: In evaluation mode, on `device`.
        paths: Image files.
        postprocess: Output to detections.
        preprocessing: Of the checkpoint: how images become what the model was trained on.
        min_score: Detections below this score are left out.
        batch_size: Images at once; they are padded to one size, which changes the results a little.
        precision: Of the forward pass.
        device: Where to compute.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    resize = EvalTransform(**preprocessing["resize"])
    waiting: list[tuple[Path, Tensor]] = []

    def flush() -> Iterator[Prediction]:
        batch = _batch([image for _, image in waiting], resize, pad_to=preprocessing["pad_to"])
        found = detect(model, batch, postprocess, precision=precision, device=device)
        for (path, image), detections in zip(waiting, found, strict=True):
            yield Prediction(path, image, _at_least(detections, min_score))
        waiting.clear()

    for path in paths:
        try:
            waiting.append((path, read_image(path, apply_exif=preprocessing["apply_exif"])))
        except ValueError as error:
            _logger.warning("left out: %s", error)
        if len(waiting) == batch_size:
            yield from flush()
    if waiting:
        yield from flush()


def write_predictions(predictions: Iterable[Prediction], folder: Path, class_table: ClassTable) -> tuple[int, int]:
    """Write predictions.json and the drawn images to `folder`; returns how many images and detections.

    A row is a detection in COCO's result format with the names of file and class: `image_id` counts the images
    from 1, `category_id` is that of the training data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(zip(class_table.category_ids, class_table.names, strict=True))
    rows: list[dict[str, Any]] = []
    drawn: set[str] = set()
    for image_id, prediction in enumerate(predictions, start=1):
        for result in to_results(image_id, prediction.detections, class_table):
            name = names[result["category_id"]]
            rows.append({**result, "category_name": name, "file_name": prediction.path.name})
        picture = draw_detections(prediction.image, prediction.detections, class_table.names, min_score=0.0)
        # photo.jpg and photo.png become photo.png and photo.png.png
        stem = prediction.path.stem if prediction.path.stem not in drawn else prediction.path.name
        drawn.add(stem)
        picture.save(folder / f"{stem}.png")
    write_json(folder / PREDICTIONS, rows)
    return len(drawn), len(rows)


def _batch(images: Sequence[Tensor], resize: EvalTransform, *, pad_to: int) -> Batch:
    no_boxes, no_labels = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    resized = [resize(image, no_boxes, no_labels)[0] for image in images]
    targets = tuple(
        Target(no_labels, no_boxes, image_id=index, orig_size=(image.shape[1], image.shape[2]))
        for index, image in enumerate(images)
    )
    return Batch(ImageBatch.from_images(resized, pad_to=pad_to), targets)


def _at_least(detections: Detections, min_score: float) -> Detections:
    keep = detections.scores >= min_score
    return Detections(detections.scores[keep], detections.labels[keep], detections.boxes[keep])
