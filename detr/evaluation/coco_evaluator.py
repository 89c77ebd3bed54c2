"""COCO average precision of a detector, over one or more ranks, or of a file of detections."""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from detr.distributed import broadcast_object, gather_objects, is_main
from detr.evaluation.backends import check_backend, match_tables
from detr.evaluation.coco_format import (
    CocoResult,
    GroundTruth,
    ImageId,
    number_results,
    prepare_ground_truth,
    read_annotations,
    read_results,
    to_results,
)
from detr.evaluation.coco_metrics import CocoMetrics, distinct_names, summarize_tables
from detr.structures import ClassTable, Detections

_logger = logging.getLogger(__name__)

COCO_MAX_DETECTIONS = (1, 10, 100)


class CocoEvaluator:
    """Collects detections and scores them.

    Every image of the annotation file counts: objects of images that were never given to `update` are
    misses. Each rank updates with its own share of the images; shards need no padding, and an image that two
    ranks saw counts once (the lower rank's). `summarize` and `gather_results` are collectives: all ranks call
    them, whatever they saw.

    Args:
        ground_truth: A parsed COCO annotation file; see :func:`prepare_ground_truth`. Left as it is.
        class_table: What the labels of the detections mean. Detections of categories that the annotation file
            does not list (unnamed rows of a 91-row table) are left out.
        max_detections: Limits of detections an image and class (not an image), ascending. AP uses the last.
        backend: "pycocotools" or "faster_coco_eval"; equal to 1e-6, the second several times faster.

    Raises:
        ValueError: The ground truth, the limits or the backend's name do not fit, or the class table is one
            of another dataset.
        ImportError: The backend's package is not installed.
    """

    def __init__(
        self,
        ground_truth: Mapping[str, Any],
        class_table: ClassTable,
        *,
        max_detections: Sequence[int] = COCO_MAX_DETECTIONS,
        backend: str = "pycocotools",
    ) -> None:
        check_backend(backend)
        self.max_detections = _checked_limits(max_detections)
        self.backend = backend
        self.class_table = class_table
        self._ground_truth = prepare_ground_truth(ground_truth)
        _check_classes(class_table, self._ground_truth.categories)
        self._results: dict[ImageId, list[CocoResult]] = {}
        self._of_all_ranks: dict[ImageId, list[CocoResult]] = {}

    @property
    def num_objects(self) -> dict[str, int]:
        """The objects of each class in the ground truth, crowds left out; named as in `CocoMetrics.per_class`."""
        categories = self._ground_truth.categories
        counts = Counter(each["category_id"] for each in self._ground_truth.annotations if not each["iscrowd"])
        return {name: counts[id] for name, id in zip(distinct_names(categories), categories, strict=True)}

    def reset(self) -> None:
        """Forget all detections; call it before each evaluation."""
        self._results = {}
        self._of_all_ranks = {}

    def update(self, image_ids: Sequence[ImageId], detections: Sequence[Detections]) -> None:
        """Add the detections of some images. No collective.

        Args:
            image_ids: The ids in the annotation file.
            detections: One an image, possibly without detections; on the CPU, or each tensor is copied there.

        Raises:
            ValueError: An unknown image id, one given before, a label outside the class table, or a box or
                score that is not finite.
        """
        if len(image_ids) != len(detections):
            raise ValueError(f"{len(image_ids)} image ids for the detections of {len(detections)} images")
        for image_id, found in zip(image_ids, detections, strict=True):
            self._ground_truth.image_number(image_id)
            if image_id in self._results:
                raise ValueError(
                    f"image {image_id!r} was given before; call reset() before each evaluation, and give "
                    "each image once"
                )
            self._results[image_id] = self._checked_results(image_id, found)

    def gather_results(self) -> list[CocoResult]:
        """The detections of all ranks in COCO's result format, each image once, on rank 0; none elsewhere.

        A collective.
        """
        return [result for results in self._gather().values() for result in results]

    def results_of(self, image_id: ImageId) -> list[CocoResult]:
        """What was found on an image by whichever rank saw it; on rank 0 after `summarize`. No collective.

        Raises:
            KeyError: No rank has seen the image.
        """
        return self._of_all_ranks[image_id]

    def summarize(self) -> CocoMetrics:
        """Score the detections of all ranks. A collective: rank 0 computes, all ranks return the same."""
        gathered = self._of_all_ranks = self._gather()
        metrics = None
        if is_main():
            num_missing = len(self._ground_truth.image_numbers) - len(gathered)
            if num_missing:
                _logger.warning(
                    "%d of the %d images of the annotation file were not evaluated; their objects are misses",
                    num_missing,
                    len(self._ground_truth.image_numbers),
                )
            metrics = _score(
                self._ground_truth,
                number_results([result for results in gathered.values() for result in results], self._ground_truth),
                max_detections=self.max_detections,
                backend=self.backend,
            )
        metrics = broadcast_object(metrics)
        assert metrics is not None
        return metrics

    def _gather(self) -> dict[ImageId, list[CocoResult]]:
        merged: dict[ImageId, list[CocoResult]] = {}
        for results in gather_objects(self._results):
            for image_id, found in results.items():
                merged.setdefault(image_id, found)
        return merged

    def _checked_results(self, image_id: ImageId, found: Detections) -> list[CocoResult]:
        labels = found.labels.cpu()
        num_classes = self.class_table.num_classes
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f"image {image_id!r}: labels must be in [0, {num_classes}), the rows of the class table; "
                f"found {int(labels.min())} to {int(labels.max())}"
            )
        if not bool(torch.isfinite(found.scores).all() & torch.isfinite(found.boxes).all()):
            raise ValueError(
                f"image {image_id!r}: the detections hold NaN or infinity, so the model's output does; check "
                "the training loss, or evaluate with precision=fp32"
            )
        return [
            result
            for result in to_results(image_id, found, self.class_table)
            if result["category_id"] in self._ground_truth.categories
        ]


def evaluate_files(
    annotations: Path,
    detections: Path,
    *,
    max_detections: Sequence[int] = COCO_MAX_DETECTIONS,
    backend: str = "pycocotools",
) -> CocoMetrics:
    """Score a COCO result file against an annotation file.

    Args:
        annotations: The annotation file; all of its images count.
        detections: A JSON list of {image_id, category_id, bbox: (x, y, w, h) in pixels, score}; may be empty.
        max_detections: Limits of detections an image and class, ascending. AP uses the last.
        backend: "pycocotools" or "faster_coco_eval".

    Raises:
        FileNotFoundError: One of the files is not there.
        ValueError: A file is faulty, a detection is of an unknown image or category, or a setting does not
            fit.
        ImportError: The backend's package is not installed.
    """
    check_backend(backend)
    limits = _checked_limits(max_detections)
    ground_truth = prepare_ground_truth(read_annotations(annotations), f"annotation file {annotations}")
    results = number_results(read_results(detections), ground_truth, f"detection file {detections}")
    return _score(ground_truth, results, max_detections=limits, backend=backend)


def _score(
    ground_truth: GroundTruth,
    results: Sequence[dict[str, Any]],
    *,
    max_detections: Sequence[int],
    backend: str,
) -> CocoMetrics:
    precision, recall = match_tables(
        ground_truth,
        results,
        max_detections=max_detections,
        backend=backend,
    )
    return summarize_tables(precision, recall, max_detections=max_detections, categories=ground_truth.categories)


def _checked_limits(max_detections: Sequence[int]) -> tuple[int, ...]:
    limits = tuple(max_detections)
    ascending = all(low < high for low, high in itertools.pairwise(limits))
    if not limits or not ascending or limits[0] < 1:
        raise ValueError(f"max_detections must be ascending limits from 1, as in [1, 10, 100]; got {list(limits)}")
    return limits


def _check_classes(class_table: ClassTable, categories: Mapping[int, str]) -> None:
    """Refuse a class table of another dataset, where every AP would be meaningless."""
    rows = {id: name for name, id in zip(class_table.names, class_table.category_ids, strict=True) if name}
    shared = rows.keys() & categories.keys()
    if not shared:
        raise ValueError(
            f"the model's category ids ({_shorten(rows)}) and those of the annotation file "
            f"({_shorten(categories)}) have none in common; evaluate on the dataset the model was trained on"
        )
    renamed = [id for id in sorted(shared) if rows[id].strip().casefold() != categories[id].strip().casefold()]
    if renamed:
        pairs = ", ".join(f"{id}: {rows[id]!r} against {categories[id]!r}" for id in renamed[:5])
        raise ValueError(
            f"{len(renamed)} category ids mean different classes to the model and the annotation file "
            f"({pairs}); evaluate on the dataset the model was trained on, or give the categories the same "
            "names"
        )
    unknown = {id: name for id, name in categories.items() if id not in rows}
    if unknown:
        _logger.warning(
            "%d categories of the annotation file are unknown to the model and score 0: %s",
            len(unknown),
            _shorten(unknown),
        )


def _shorten(categories: Mapping[int, str]) -> str:
    shown = ", ".join(f"{id} {name}" for id, name in list(categories.items())[:5])
    return f"{shown}, ... {len(categories)} in all" if len(categories) > 5 else shown
