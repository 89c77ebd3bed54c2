"""Detections on images that belong to no dataset."""

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detr.data import EvalTransform
from detr.engine.evaluate import detect
from detr.engine.precision import Precision
from detr.evaluation import PostProcess
from detr.inference.image_sources import Skipped, SourceImage, skip
from detr.structures import Batch, Detections, ImageBatch, Target

# longer side in pixels that images are made smaller to where the training set no limit: a panorama resized by its
# short side, or a photo kept as it is, can be too much for any memory
MAX_SIZE_PX = 2000

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prediction:
    """What was found on one image.

    Attributes:
        source: The image, as read.
        detections: In pixels of the image, best first.
    """

    source: SourceImage
    detections: Detections


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
            raise ValueError(f"there is no class {name!r}; {hint}the model knows {known}")
    return [names.index(name) for name in wanted]


def predict(
    model: nn.Module,
    images: Iterable[SourceImage],
    postprocess: PostProcess,
    *,
    preprocessing: Mapping[str, Any],
    min_score: float,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    labels: Sequence[int] | None = None,
    max_size: int | None = MAX_SIZE_PX,
    skipped: list[Skipped],
) -> Iterator[Prediction]:
    """Detect on images, in order. An image that the model cannot take is reported and left out.

    Args:
        model: In evaluation mode, on `device`.
        images: As `read_images` or `read_frames` yields them.
        postprocess: Output to detections.
        preprocessing: Of the checkpoint: how images become what the model was trained on.
        min_score: Detections below this score are left out.
        batch_size: Images at once; they are padded to one size, which changes the results a little.
        precision: Of the forward pass.
        device: Where to compute.
        labels: Classes to keep; None keeps all.
        max_size: See `resize_for`.
        skipped: Holds what the reader of the images left out, and takes what is left out here.

    Raises:
        ValueError: There is a prediction for none of the images; lists why.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    resize = EvalTransform(**preprocessing["resize"])
    waiting: list[SourceImage] = []
    num_predicted = 0
    num_limited = 0

    def found_on(batch_images: Sequence[SourceImage]) -> Iterator[Prediction]:
        pixels = [each.pixels for each in batch_images]
        batch = detection_batch(pixels, resize, pad_to=preprocessing["pad_to"], max_size=max_size)
        try:
            found = detect(model, batch, postprocess, precision=precision, device=device)
        except (ValueError, torch.OutOfMemoryError) as error:
            # as an image with fewer feature cells than queries; the others of its batch are none the worse
            if len(batch_images) == 1:
                skip(skipped, batch_images[0].path, _why_not(error, batch))
                return
            for one in batch_images:
                yield from found_on([one])
            return
        for source, detections in zip(batch_images, found, strict=True):
            yield Prediction(source, _wanted(detections, min_score, labels))

    for image in images:
        if resize_for(image.pixels, resize, max_size) is not resize:
            num_limited += 1
            if num_limited == 1:
                _say_limit(image, max_size)
        waiting.append(image)
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
            f"none of the {len(skipped)} files of the source could be used as an image:\n{shown}{more}\n"
            "Give an image that opens in a viewer, or a folder of such images"
        )


def resize_for(image: Tensor, resize: EvalTransform, max_size: int | None) -> EvalTransform:
    """`resize` itself, or one that keeps the longer side within `max_size` where `resize` sets no limit.

    Args:
        image: (3, h, w).
        resize: Of the checkpoint.
        max_size: In pixels; None: no limit.
    """
    if max_size is None or resize.max_size is not None or isinstance(resize.size, tuple):
        return resize
    short_px, long_px = sorted(image.shape[1:])
    size_px = short_px if resize.size is None else resize.size
    if long_px * size_px <= max_size * short_px:
        return resize
    return EvalTransform(size_px, max_size)


def _say_limit(image: SourceImage, max_size: int | None) -> None:
    _, height, width = image.pixels.shape
    _logger.warning(
        "%s, %d x %d pixels, is made smaller for the model, to %s pixels at its longer side, and so are others: the "
        "training set no limit. max_size=N sets another, max_size=null none",
        image.path,
        width,
        height,
        max_size,
    )


def _why_not(error: Exception, batch: Batch) -> str:
    if not isinstance(error, torch.OutOfMemoryError):
        return str(error)
    H, W = batch.images.pixels.shape[2:]
    return f"it does not fit into the GPU's memory as {W} x {H} pixels; give a smaller max_size="


def detection_batch(
    images: Sequence[Tensor], resize: EvalTransform, *, pad_to: int, max_size: int | None = MAX_SIZE_PX
) -> Batch:
    """Images (3, h, w) uint8 without targets, resized and padded as the model wants them; see `resize_for`."""
    no_boxes, no_labels = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    resized = [resize_for(image, resize, max_size)(image, no_boxes, no_labels)[0] for image in images]
    targets = tuple(
        Target(no_labels, no_boxes, image_id=index, orig_size=(image.shape[1], image.shape[2]))
        for index, image in enumerate(images)
    )
    return Batch(ImageBatch.from_images(resized, pad_to=pad_to), targets)


def _wanted(detections: Detections, min_score: float, labels: Sequence[int] | None) -> Detections:
    keep = detections.scores >= min_score
    if labels is not None:
        keep &= torch.isin(detections.labels, torch.tensor(labels, dtype=torch.int64))
    return select(detections, keep)


def select(detections: Detections, keep: Tensor) -> Detections:
    """The detections where `keep` (T,) is True."""
    return Detections(detections.scores[keep], detections.labels[keep], detections.boxes[keep])
