"""Where the average precision comes from: by class, by size, over recall, and by kind of mistake."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detr.evaluation.backends import check_backend, match_tables
from detr.evaluation.coco_format import (
    GroundTruth,
    number_results,
    prepare_ground_truth,
    read_annotations,
    read_results,
)
from detr.evaluation.coco_metrics import CocoMetrics, distinct_names, summarize_tables
from detr.evaluation.errors import ErrorAnalysis, analyze_errors

# recall levels of the precision tables
RECALL_LEVELS = np.linspace(0.0, 1.0, 101)
_IOU_50, _IOU_75 = 0, 5
_SIZES = {"all": 0, "small": 1, "medium": 2, "large": 3}


@dataclass(frozen=True)
class ClassAnalysis:
    """One class. Numbers are in [0, 1]; None where there is nothing to find.

    Attributes:
        name: Of the class.
        category_id: Of the class.
        num_objects: Objects in the annotation file, without crowds.
        AP: Mean over IoU 0.50:0.95.
        AP50: At IoU 0.50.
        AP_small: Of objects below 32 x 32 px.
        AP_medium: Of objects of 32 x 32 to 96 x 96 px.
        AP_large: Of larger objects.
        precision: (2, 101) precision at IoU 0.50 and 0.75 at each recall level; -1 where there is nothing to find.
    """

    name: str
    category_id: int
    num_objects: int
    AP: float | None
    AP50: float | None
    AP_small: float | None
    AP_medium: float | None
    AP_large: float | None
    precision: NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the curve."""
        return {name: value for name, value in vars(self).items() if name != "precision"}


@dataclass(frozen=True)
class Analysis:
    """All that the report shows.

    Attributes:
        metrics: The COCO numbers.
        classes: In the order of the category ids.
        errors: Mistakes at a score threshold.
        ground_truth: What was scored against.
        detections: All of them, numbered.
        file_names: Image number -> file, of images whose file is named.
    """

    metrics: CocoMetrics
    classes: tuple[ClassAnalysis, ...]
    errors: ErrorAnalysis
    ground_truth: GroundTruth
    detections: Sequence[dict[str, Any]]
    file_names: Mapping[int, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for analysis.json."""
        names = [each.name for each in self.classes]
        return {
            "metrics": self.metrics.numbers(),
            "classes": [each.to_dict() for each in self.classes],
            "errors": {
                "min_score": self.errors.min_score,
                "correct": self.errors.num_correct,
                **self.errors.counts(),
            },
            "confusion": {"classes": names, "rows_true_columns_predicted": self.errors.confusion.tolist()},
        }


def analyze_files(
    annotations: Path,
    detections: Path,
    *,
    min_score: float = 0.3,
    max_detections: Sequence[int] = (1, 10, 100),
    backend: str = "pycocotools",
) -> Analysis:
    """Analyse a COCO result file against an annotation file.

    Args:
        annotations: All of its images count.
        detections: As tools/evaluate.py writes them.
        min_score: Of the detections whose mistakes are looked at; AP takes all.
        max_detections: Limits of detections an image and class, ascending.
        backend: "pycocotools" or "faster_coco_eval".

    Raises:
        FileNotFoundError: One of the files is not there.
        ValueError: A file is faulty.
        ImportError: The backend's package is not installed.
    """
    check_backend(backend)
    dataset = read_annotations(annotations)
    ground_truth = prepare_ground_truth(dataset, f"annotation file {annotations}")
    results = number_results(read_results(detections), ground_truth, f"detection file {detections}")
    precision, recall = match_tables(ground_truth, results, max_detections=max_detections, backend=backend)
    metrics = summarize_tables(precision, recall, max_detections=max_detections, categories=ground_truth.categories)
    return Analysis(
        metrics,
        _classes(ground_truth, precision),
        analyze_errors(ground_truth, results, min_score=min_score),
        ground_truth,
        results,
        {
            ground_truth.image_number(image["id"]): str(image["file_name"])
            for image in dataset["images"]
            if "file_name" in image
        },
    )


def _classes(ground_truth: GroundTruth, precision: NDArray[np.float64]) -> tuple[ClassAnalysis, ...]:
    """From the precision table (T, R, K, A, M)."""
    objects = Counter(each["category_id"] for each in ground_truth.annotations if not each["iscrowd"])
    classes = []
    for row, (id, name) in enumerate(
        zip(ground_truth.categories, distinct_names(ground_truth.categories), strict=True)
    ):
        table = precision[:, :, row, :, -1]  # (T, R, A)
        sizes = {size: _mean_of_present(table[:, :, area]) for size, area in _SIZES.items()}
        classes.append(
            ClassAnalysis(
                name=name,
                category_id=id,
                num_objects=objects[id],
                AP=sizes["all"],
                AP50=_mean_of_present(table[_IOU_50, :, 0]),
                AP_small=sizes["small"],
                AP_medium=sizes["medium"],
                AP_large=sizes["large"],
                precision=table[[_IOU_50, _IOU_75], :, 0],
            )
        )
    return tuple(classes)


def _mean_of_present(table: NDArray[np.float64]) -> float | None:
    present = table[table > -1]
    return float(present.mean()) if present.size else None
