"""What kinds of mistakes detections make: duplicate, classification, localisation, both, background, missed.

The kinds are those of TIDE (arXiv 2008.08115), on detections of at least one score: a false positive takes the first
kind that fits, with foreground overlap `_FOREGROUND` and background overlap `_BACKGROUND`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detr.evaluation.coco_format import GroundTruth

KINDS = ("duplicate", "classification", "localisation", "both", "background", "missed")

_FOREGROUND = 0.5
_BACKGROUND = 0.1


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        kind: One of `KINDS`.
        image_number: The image, as `GroundTruth` numbers it.
        category_id: Of the detection; of the object for a missed one.
        true_category_id: Of the object that the detection overlaps most; None for background.
        bbox: (x, y, w, h) in pixels, of the detection or the missed object.
        score: Of the detection; None for a missed object.
    """

    kind: str
    image_number: int
    category_id: int
    true_category_id: int | None
    bbox: tuple[float, float, float, float]
    score: float | None


@dataclass(frozen=True)
class ErrorAnalysis:
    """Mistakes and confusions of a set of detections.

    Attributes:
        min_score: Detections below it were left out.
        num_correct: Detections that found an object.
        mistakes: All others, and the missed objects, image by image.
        confusion: (K + 1, K + 1) counts; row: true class, column: predicted class, in the order of the categories.
            The last row holds detections of nothing, the last column objects without a detection.
    """

    min_score: float
    num_correct: int
    mistakes: tuple[Mistake, ...]
    confusion: NDArray[np.int64]

    def counts(self) -> dict[str, int]:
        """Mistakes by kind, zeros included."""
        found = Counter(mistake.kind for mistake in self.mistakes)
        return {kind: found[kind] for kind in KINDS}

    def worst_images(self, num_images: int) -> list[tuple[int, int]]:
        """(image number, mistakes) of the images with most mistakes, most first, without those that have none."""
        return Counter(mistake.image_number for mistake in self.mistakes).most_common(num_images)


def analyze_errors(
    ground_truth: GroundTruth, detections: Sequence[Mapping[str, Any]], *, min_score: float = 0.3
) -> ErrorAnalysis:
    """Sort the mistakes of detections into kinds.

    Detections that lie on a crowd of their class are neither right nor wrong. A missed object is one that no
    detection found and that no classification or localisation mistake is about.

    Args:
        ground_truth: From `prepare_ground_truth`.
        detections: From `number_results`.
        min_score: Detections below it are left out: what a user would not look at.
    """
    objects = defaultdict(list)
    for annotation in ground_truth.annotations:
        objects[annotation["image_id"]].append(annotation)
    found = defaultdict(list)
    for detection in detections:
        if detection["score"] >= min_score:
            found[detection["image_id"]].append(detection)
    index = {id: row for row, id in enumerate(ground_truth.categories)}
    confusion = np.zeros((len(index) + 1, len(index) + 1), dtype=np.int64)
    mistakes: list[Mistake] = []
    num_correct = 0
    for image in ground_truth.image_numbers.values():
        best_first = sorted(found[image], key=lambda detection: -detection["score"])
        wrong, correct = _image_mistakes(image, objects[image], best_first)
        mistakes += wrong
        num_correct += correct
        _count_confusions(confusion, index, objects[image], best_first)
    return ErrorAnalysis(min_score, num_correct, tuple(mistakes), confusion)


def overlaps(
    boxes: NDArray[np.float64], others: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """IoU (A, B) of boxes (A, 4) and (B, 4) as (x, y, w, h), and the covered share (A, B) of `boxes`."""
    x0 = np.maximum(boxes[:, None, 0], others[None, :, 0])
    y0 = np.maximum(boxes[:, None, 1], others[None, :, 1])
    x1 = np.minimum(boxes[:, None, 0] + boxes[:, None, 2], others[None, :, 0] + others[None, :, 2])
    y1 = np.minimum(boxes[:, None, 1] + boxes[:, None, 3], others[None, :, 1] + others[None, :, 3])
    shared = np.clip(x1 - x0, 0, None) * np.clip(y1 - y0, 0, None)
    area, other_area = boxes[:, 2] * boxes[:, 3], others[:, 2] * others[:, 3]
    union = area[:, None] + other_area[None] - shared
    with np.errstate(divide="ignore", invalid="ignore"):
        iou = np.where(union > 0, shared / union, 0.0)
        covered = np.where(area[:, None] > 0, shared / area[:, None], 0.0)
    return iou, covered


def _image_mistakes(
    image: int, annotations: Sequence[Mapping[str, Any]], detections: Sequence[Mapping[str, Any]]
) -> tuple[list[Mistake], int]:
    """Mistakes of one image, detections best first, and how many are right."""
    singles = [annotation for annotation in annotations if not annotation["iscrowd"]]
    crowds = [annotation for annotation in annotations if annotation["iscrowd"]]
    iou, _ = overlaps(_boxes(detections), _boxes(singles))
    _, covered = overlaps(_boxes(detections), _boxes(crowds))
    true_ids = np.array([annotation["category_id"] for annotation in singles], dtype=np.int64)
    crowd_ids = np.array([annotation["category_id"] for annotation in crowds], dtype=np.int64)
    is_found = np.zeros(len(singles), dtype=bool)
    is_explained = np.zeros(len(singles), dtype=bool)
    left: list[int] = []
    for row, detection in enumerate(detections):
        free = np.where((true_ids == detection["category_id"]) & ~is_found, iou[row], 0.0)
        if free.size and free.max() >= _FOREGROUND:
            is_found[free.argmax()] = True
        elif not (covered[row][crowd_ids == detection["category_id"]] >= _FOREGROUND).any():
            left.append(row)
    mistakes = []
    for row in left:
        category = detections[row]["category_id"]
        same = np.where(true_ids == category, iou[row], 0.0)
        other = np.where(true_ids != category, iou[row], 0.0)
        kind, about = _kind(same, other)
        if kind in ("classification", "localisation") and about is not None:
            is_explained[about] = True
        mistakes.append(_mistake(kind, image, detections[row], None if about is None else int(true_ids[about])))
    mistakes += [
        _mistake("missed", image, singles[column], int(true_ids[column]))
        for column in np.flatnonzero(~is_found & ~is_explained)
    ]
    return mistakes, int(is_found.sum())


def _kind(same: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[str, int | None]:
    """Kind of a false positive from its overlaps with objects of its class and of others, and which object it is."""
    best_same = same.max(initial=0.0)
    best_other = other.max(initial=0.0)
    if best_same >= _FOREGROUND:
        return "duplicate", int(same.argmax())
    if best_other >= _FOREGROUND:
        return "classification", int(other.argmax())
    if best_same >= _BACKGROUND:
        return "localisation", int(same.argmax())
    if best_other >= _BACKGROUND:
        return "both", int(other.argmax())
    return "background", None


def _count_confusions(
    confusion: NDArray[np.int64],
    index: Mapping[int, int],
    annotations: Sequence[Mapping[str, Any]],
    detections: Sequence[Mapping[str, Any]],
) -> None:
    """Pair detections, best first, with the free object they overlap most, whatever its class."""
    nothing = len(index)
    singles = [annotation for annotation in annotations if not annotation["iscrowd"]]
    crowds = [annotation for annotation in annotations if annotation["iscrowd"]]
    iou, _ = overlaps(_boxes(detections), _boxes(singles))
    _, covered = overlaps(_boxes(detections), _boxes(crowds))
    is_free = np.ones(len(singles), dtype=bool)
    for row, detection in enumerate(detections):
        free = np.where(is_free, iou[row], 0.0)
        column = index[detection["category_id"]]
        if free.size and free.max() >= _FOREGROUND:
            is_free[free.argmax()] = False
            confusion[index[singles[int(free.argmax())]["category_id"]], column] += 1
        elif not (covered[row] >= _FOREGROUND).any():
            confusion[nothing, column] += 1
    for missed in np.flatnonzero(is_free):
        confusion[index[singles[missed]["category_id"]], nothing] += 1


def _mistake(kind: str, image: int, entry: Mapping[str, Any], true_id: int | None) -> Mistake:
    x, y, w, h = entry["bbox"]
    return Mistake(kind, image, entry["category_id"], true_id, (x, y, w, h), entry.get("score"))


def _boxes(entries: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    return np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
