"""Detections on image files that belong to no dataset."""

import difflib
import glob
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

# recognised to say what to do with them
VIDEO_SUFFIXES = frozenset((".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v"))
IMAGES = "images.json"

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
    """The image files that `source` stands for, by name.

    Args:
        source: An image file, a folder (images directly in it), or a pattern such as photos/**/*.jpg.

    Raises:
        FileNotFoundError: There is nothing of that name, or nothing fits the pattern.
        ValueError: The folder holds no image, or `source` is a video.
    """
    source = Path(source).expanduser()
    if source.is_file():
        if source.suffix.lower() in VIDEO_SUFFIXES:
            raise ValueError(
                f"source={source} is a video, which is not decoded here; make images of it first, as with "
                f"`ffmpeg -i {source} -vf fps=5 frames/%05d.jpg`, and give that folder"
            )
        return [source]
    if not source.is_dir():
        if glob.has_magic(str(source)):
            return _images_of_pattern(source)
        raise FileNotFoundError(f"source={source} is neither an image nor a folder; check the path")
    paths = sorted(path for path in source.iterdir() if _is_image_file(path))
    if not paths:
        raise ValueError(
            f"source={source} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}); give a folder of images, or "
            f"source='{source}/**/*.jpg' for its subfolders"
        )
    return paths


def class_labels(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """The labels of classes by name.

    Raises:
        ValueError: There is no such class; similar names are listed.
    """
    for name in wanted:
        if name not in names or not name:
            close = difflib.get_close_matches(name, [each for each in names if each], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            known = ", ".join(each for each in names if each)
            raise ValueError(f"there is no class {name!r}; {hint}The model knows {known}")
    return [names.index(name) for name in wanted]


def _images_of_pattern(pattern: Path) -> list[Path]:
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    images = [path for path in found if _is_image_file(path)]
    if not images:
        raise FileNotFoundError(
            f"source={pattern} fits {len(found)} files, none of them an image ({', '.join(sorted(IMAGE_SUFFIXES))}); "
            "check the pattern, and quote it for the shell"
        )
    return images


def _is_image_file(path: Path) -> bool:
    # a folder may be called x.jpg
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


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


@dataclass(frozen=True)
class Skipped:
    """A file without a prediction, and why."""

    path: Path
    reason: str


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
    labels: Sequence[int] | None = None,
    skipped: list[Skipped] | None = None,
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
        labels: Classes to keep; None keeps all.
        skipped: Takes the files that were left out.

    Raises:
        ValueError: None of the files can be read; lists why.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    resize = EvalTransform(**preprocessing["resize"])
    skipped = [] if skipped is None else skipped
    waiting: list[tuple[Path, Tensor]] = []
    num_predicted = 0

    def skip(path: Path, reason: object) -> None:
        skipped.append(Skipped(path, str(reason)))
        _logger.warning("left out %s: %s", path, reason)

    def found_on(images: Sequence[tuple[Path, Tensor]]) -> Iterator[Prediction]:
        batch = detection_batch([image for _, image in images], resize, pad_to=preprocessing["pad_to"])
        try:
            found = detect(model, batch, postprocess, precision=precision, device=device)
        except ValueError as error:
            # as an image with fewer feature cells than queries; the others of its batch are none the worse
            if len(images) == 1:
                skip(images[0][0], error)
                return
            for one in images:
                yield from found_on([one])
            return
        for (path, image), detections in zip(images, found, strict=True):
            yield Prediction(path, image, _wanted(detections, min_score, labels))

    for path in paths:
        try:
            waiting.append((path, read_image(path, apply_exif=preprocessing["apply_exif"])))
        except (ValueError, OSError) as error:
            # the advice of `read_image` is for datasets; what it found is the cause
            skip(path, f"{error.__cause__ or error}. Truncated, broken or not an image")
        if len(waiting) == batch_size:
            for prediction in found_on(waiting):
                num_predicted += 1
                yield prediction
            waiting.clear()
    if waiting:
        for prediction in found_on(waiting):
            num_predicted += 1
            yield prediction
    if skipped and not num_predicted:
        shown = "\n".join(f"  {each.path}: {each.reason}" for each in skipped[:15])
        more = f"\n  and {len(skipped) - 15} more" if len(skipped) > 15 else ""
        raise ValueError(
            f"none of the {len(skipped)} files of the source could be read as an image:\n{shown}{more}\n"
            "Give an image that opens in a viewer, or a folder of such images"
        )


def write_predictions(
    predictions: Iterable[Prediction],
    folder: Path,
    class_table: ClassTable,
    *,
    draw: bool = True,
    skipped: Sequence[Skipped] = (),
) -> tuple[int, int]:
    """Write predictions.json, images.json and the drawn images to `folder`.

    A row of predictions.json is a detection in COCO's result format with the names of file and class: `image_id`
    counts the images from 1, `category_id` is that of the training data. Detections of rows without a name, which
    stand for no category (the gaps of `label_map=category_id`), are left out as they are in an evaluation.
    images.json lists all images with their ids, and the files that were skipped.

    Args:
        predictions: Consumed once.
        folder: Made if it does not exist.
        class_table: What the labels mean.
        draw: Write the images with their boxes.
        skipped: What `predict` fills while `predictions` is consumed.

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
    for image_id, prediction in enumerate(predictions, start=1):
        require_other_folder(folder, [prediction.path])
        detections = _of_named_classes(prediction.detections, class_table)
        for result in to_results(image_id, detections, class_table):
            name = names[result["category_id"]]
            rows.append({**result, "category_name": name, "file_name": prediction.path.name})
        _, height, width = prediction.image.shape
        images.append({"id": image_id, "file_name": str(prediction.path), "width": width, "height": height})
        if draw:
            picture = draw_detections(prediction.image, detections, class_table.names, min_score=0.0)
            picture.save(folder / f"{_free_stem(prediction.path, drawn)}.png")
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


def detection_batch(images: Sequence[Tensor], resize: EvalTransform, *, pad_to: int) -> Batch:
    """Images (3, h, w) uint8 without targets, resized and padded as the model wants them."""
    no_boxes, no_labels = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    resized = [resize(image, no_boxes, no_labels)[0] for image in images]
    targets = tuple(
        Target(no_labels, no_boxes, image_id=index, orig_size=(image.shape[1], image.shape[2]))
        for index, image in enumerate(images)
    )
    return Batch(ImageBatch.from_images(resized, pad_to=pad_to), targets)


def _wanted(detections: Detections, min_score: float, labels: Sequence[int] | None) -> Detections:
    keep = detections.scores >= min_score
    if labels is not None:
        keep &= torch.isin(detections.labels, torch.tensor(labels, dtype=torch.int64))
    return _select(detections, keep)


def _of_named_classes(detections: Detections, class_table: ClassTable) -> Detections:
    is_named = torch.tensor([name != "" for name in class_table.names])  # (C,)
    return _select(detections, is_named[detections.labels])


def _select(detections: Detections, keep: Tensor) -> Detections:
    return Detections(detections.scores[keep], detections.labels[keep], detections.boxes[keep])
