"""Predictions as files: COCO's result format, and pictures or a video with the boxes drawn."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from detr.engine.run_folder import PREDICTIONS, write_json
from detr.evaluation import to_results
from detr.inference.image_sources import Skipped, require_other_folder
from detr.inference.predict import Prediction, select
from detr.inference.video import VideoWriter
from detr.structures import ClassTable, Detections
from detr.visualize import draw_detections

IMAGES = "images.json"


def write_predictions(
    predictions: Iterable[Prediction],
    folder: Path,
    class_table: ClassTable,
    *,
    draw: bool = True,
    skipped: Sequence[Skipped] = (),
    video_fps: float = 25.0,
) -> tuple[int, int]:
    """Write predictions.json, images.json and the drawn images to `folder`.

    A row of predictions.json is a detection in COCO's result format with the names of file and class: `image_id`
    counts the images from 1, `category_id` is that of the training data. Detections of rows without a name, which
    stand for no category (the gaps of `label_map=category_id`), are left out as they are in an evaluation.
    images.json lists all images with their ids, and the files that were skipped. Frames of a video have `frame` and
    `time_s` in both files, and are drawn into one .mp4.

    Args:
        predictions: Consumed once.
        folder: Made if it does not exist.
        class_table: What the labels mean.
        draw: Write the images with their boxes.
        skipped: What `predict` fills while `predictions` is consumed.
        video_fps: Frames a second of a drawn video.

    Returns:
        How many images and detections.

    Raises:
        ValueError: `folder` holds one of the images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(zip(class_table.category_ids, class_table.names, strict=True))
    rows: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    drawn: set[str] = set()
    with ExitStack() as stack:
        video: VideoWriter | None = None
        for image_id, prediction in enumerate(predictions, start=1):
            path, moment = prediction.source.path, prediction.source.moment
            require_other_folder(folder, [path])
            detections = _of_named_classes(prediction.detections, class_table)
            when = {} if moment is None else {"frame": moment.frame, "time_s": round(moment.time_s, 6)}
            for result in to_results(image_id, detections, class_table):
                name = names[result["category_id"]]
                rows.append({**result, "category_name": name, "file_name": path.name, **when})
            _, height, width = prediction.source.pixels.shape
            images.append({"id": image_id, "file_name": str(path), "width": width, "height": height, **when})
            if not draw:
                continue
            picture = draw_detections(prediction.source.pixels, detections, class_table.names, min_score=0.0)
            if moment is None:
                picture.save(folder / f"{_free_stem(path, drawn)}.png")
            else:
                if video is None:
                    video = stack.enter_context(VideoWriter(folder / f"{path.stem}.mp4", fps=video_fps))
                video.write(picture)
    write_json(folder / PREDICTIONS, rows)
    left_out = [{"file_name": str(each.path), "reason": each.reason} for each in skipped]
    write_json(folder / IMAGES, {"images": images, "skipped": left_out})
    return len(images), len(rows)


def _free_stem(path: Path, taken: set[str]) -> str:
    """A name for a picture that none has yet: photo.jpg and photo.png become photo.png and photo.png.png."""
    stem = path.stem if path.stem not in taken else path.name
    number = 2
    while stem in taken:
        stem, number = f"{path.name}_{number}", number + 1
    taken.add(stem)
    return stem


def _of_named_classes(detections: Detections, class_table: ClassTable) -> Detections:
    is_named = torch.tensor([name != "" for name in class_table.names])  # (C,)
    return select(detections, is_named[detections.labels])
