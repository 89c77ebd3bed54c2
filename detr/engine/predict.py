"""Detections on image files that belong to no dataset."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detr.data import IMAGE_SUFFIXES, EvalTransform, read_image
from detr.engine.evaluate import detect
from detr.engine.precision import Precision
from detr.engine.run_folder import PREDICTIONS, write_json
from detr.evaluation import PostProcess, to_results
from detr.structures import Batch, ClassTable, Detections, ImageBatch, Target
from detr.visualize import draw_detections

_logger = logging.getLogger(__name__)


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


def require_other_folder(folder: str | Path, paths: Iterable[Path]) -> None:
    """Refuse to write results next to the images they come from, which the drawn ones would replace.

    Args:
        folder: Where the results go; need not exist.
        paths: The image files, or links to them.

    Raises:
        ValueError: `folder` holds one of the images.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return
    for path in paths:
        # a link may lead to an image in the folder, and the folder may be a link itself
        if any(parent.is_dir() and parent.samefile(folder) for parent in {path.parent, path.resolve().parent}):
            raise ValueError(
                f"output_dir={folder} is the folder of the source image {path}, which the drawn images could "
                "overwrite; give another output_dir= or name="
            )


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

    Raises:
        ValueError: None of the files can be read; lists why.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    resize = EvalTransform(**preprocessing["resize"])
    waiting: list[tuple[Path, Tensor]] = []
    num_read = 0
    left_out: list[str] = []

    def flush() -> Iterator[Prediction]:
        batch = _batch([image for _, image in waiting], resize, pad_to=preprocessing["pad_to"])
        found = detect(model, batch, postprocess, precision=precision, device=device)
        for (path, image), detections in zip(waiting, found, strict=True):
            yield Prediction(path, image, _at_least(detections, min_score))
        waiting.clear()

    for path in paths:
        try:
            waiting.append((path, read_image(path, apply_exif=preprocessing["apply_exif"])))
            num_read += 1
        except ValueError as error:
            # the advice of `read_image` is for datasets; what it found is the cause
            left_out.append(f"{path}: {error.__cause__ or error}")
            _logger.warning(
                "left out %s. The file is truncated, broken or not an image: replace it, or take it out of the source",
                left_out[-1],
            )
        if len(waiting) == batch_size:
            yield from flush()
    if waiting:
        yield from flush()
    if left_out and not num_read:
        shown = "\n".join(f"  {reason}" for reason in left_out[:15])
        more = f"\n  and {len(left_out) - 15} more" if len(left_out) > 15 else ""
        raise ValueError(
            f"none of the {len(left_out)} files of the source could be read as an image:\n{shown}{more}\n"
            "Give an image that opens in a viewer, or a folder of such images"
        )


def write_predictions(predictions: Iterable[Prediction], folder: Path, class_table: ClassTable) -> tuple[int, int]:
    """Write predictions.json and the drawn images to `folder`; returns how many images and detections.

    A row is a detection in COCO's result format with the names of file and class: `image_id` counts the images
    from 1, `category_id` is that of the training data. Detections of rows without a name, which stand for no
    category (the gaps of `label_map=category_id`), are left out as they are in an evaluation.

    Raises:
        ValueError: `folder` holds one of the images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(zip(class_table.category_ids, class_table.names, strict=True))
    rows: list[dict[str, Any]] = []
    drawn: set[str] = set()
    for image_id, prediction in enumerate(predictions, start=1):
        require_other_folder(folder, [prediction.path])
        detections = _of_named_classes(prediction.detections, class_table)
        for result in to_results(image_id, detections, class_table):
            name = names[result["category_id"]]
            rows.append({**result, "category_name": name, "file_name": prediction.path.name})
        picture = draw_detections(prediction.image, detections, class_table.names, min_score=0.0)
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
    return _select(detections, detections.scores >= min_score)


def _of_named_classes(detections: Detections, class_table: ClassTable) -> Detections:
    is_named = torch.tensor([name != "" for name in class_table.names])  # (C,)
    return _select(detections, is_named[detections.labels])


def _select(detections: Detections, keep: Tensor) -> Detections:
    return Detections(detections.scores[keep], detections.labels[keep], detections.boxes[keep])
