"""The COCO numbers, from the precision and recall tables that every backend makes.

Table axes: T = 10 IoU thresholds 0.50:0.05:0.95, R = 101 recall levels, K categories, A = 4 area ranges
(all, small < 32^2, medium < 96^2, large), M limits of detections an image and class. -1 = nothing to find.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_IOU_50, _IOU_75 = 0, 5
_ALL, _SMALL, _MEDIUM, _LARGE = range(4)


@dataclass(frozen=True)
class CocoMetrics:
    """Average precision and recall of COCO, in [0, 1].

    Where there is nothing to find (no object of that size, or none at all) a number is -1.0, as in
    pycocotools, and the AP of a class is None; neither enters a mean.

    Attributes:
        AP: Mean over IoU 0.50:0.95 and classes, at the largest of `max_detections`.
        AP50: At IoU 0.50.
        AP75: At IoU 0.75.
        APs: Of objects below 32 x 32 px (the `area` of the annotation).
        APm: Of objects of 32 x 32 to 96 x 96 px.
        APl: Of objects above 96 x 96 px.
        AR: Limit of detections an image and class -> mean recall over IoU 0.50:0.95 and classes.
        ARs: Recall of small objects at the largest limit.
        ARm: Of medium objects.
        ARl: Of large objects.
        per_class: Category name -> AP, in the order of the category ids. Names that two categories share are
            followed by the id, as in "cell (id 3)".
    """

    AP: float
    AP50: float
    AP75: float
    APs: float
    APm: float
    APl: float
    AR: Mapping[int, float]
    ARs: float
    ARm: float
    ARl: float
    per_class: Mapping[str, float | None]

    def numbers(self) -> dict[str, float]:
        """The twelve COCO numbers in their usual order; recalls carry their limit: AR1, AR10, AR100."""
        return {
            "AP": self.AP,
            "AP50": self.AP50,
            "AP75": self.AP75,
            "APs": self.APs,
            "APm": self.APm,
            "APl": self.APl,
            **{f"AR{limit}": recall for limit, recall in self.AR.items()},
            "ARs": self.ARs,
            "ARm": self.ARm,
            "ARl": self.ARl,
        }

    def to_dict(self) -> dict[str, Any]:
        """What metrics.json holds: the numbers and `per_class`, plain and valid JSON."""
        return {**self.numbers(), "per_class": dict(self.per_class)}

    def format_table(self) -> str:
        """A line a number, for people; "-" where there is nothing to find."""
        largest = max(self.AR)
        rows = [
            ("AP", "IoU 0.50:0.95", "all", largest, self.AP),
            ("AP50", "IoU 0.50", "all", largest, self.AP50),
            ("AP75", "IoU 0.75", "all", largest, self.AP75),
            ("APs", "IoU 0.50:0.95", "small", largest, self.APs),
            ("APm", "IoU 0.50:0.95", "medium", largest, self.APm),
            ("APl", "IoU 0.50:0.95", "large", largest, self.APl),
            *((f"AR{limit}", "IoU 0.50:0.95", "all", limit, recall) for limit, recall in self.AR.items()),
            ("ARs", "IoU 0.50:0.95", "small", largest, self.ARs),
            ("ARm", "IoU 0.50:0.95", "medium", largest, self.ARm),
            ("ARl", "IoU 0.50:0.95", "large", largest, self.ARl),
        ]
        return "\n".join(
            f"{name:<6} {format_ap(value):>6}   {iou:<13}   {area:<6}   max {limit} detections"
            for name, iou, area, limit, value in rows
        )


def summarize_tables(
    precision: NDArray[np.float64],
    recall: NDArray[np.float64],
    *,
    max_detections: Sequence[int],
    categories: Mapping[int, str],
) -> CocoMetrics:
    """The COCO numbers of an evaluation.

    It honours any limits, unlike pycocotools' own summary, which wants three and 100 among them.

    Args:
        precision: (T, R, K, A, M) in [0, 1] or -1.
        recall: (T, K, A, M) in [0, 1] or -1.
        max_detections: The M limits, ascending.
        categories: Category id -> name, in the order of the K axis.
    """
    names = distinct_names(categories)
    return CocoMetrics(
        AP=_mean_of_present(precision[:, :, :, _ALL, -1]),
        AP50=_mean_of_present(precision[_IOU_50, :, :, _ALL, -1]),
        AP75=_mean_of_present(precision[_IOU_75, :, :, _ALL, -1]),
        APs=_mean_of_present(precision[:, :, :, _SMALL, -1]),
        APm=_mean_of_present(precision[:, :, :, _MEDIUM, -1]),
        APl=_mean_of_present(precision[:, :, :, _LARGE, -1]),
        AR={limit: _mean_of_present(recall[:, :, _ALL, index]) for index, limit in enumerate(max_detections)},
        ARs=_mean_of_present(recall[:, :, _SMALL, -1]),
        ARm=_mean_of_present(recall[:, :, _MEDIUM, -1]),
        ARl=_mean_of_present(recall[:, :, _LARGE, -1]),
        per_class={
            name: None if average < 0 else average
            for name, average in (
                (name, _mean_of_present(precision[:, :, index, _ALL, -1])) for index, name in enumerate(names)
            )
        },
    )


def format_ap(value: float) -> str:
    """An AP or AR for people: four digits, or "-" where there is nothing to find."""
    return "-" if value < 0 else f"{value:.4f}"


def _mean_of_present(table: NDArray[np.float64]) -> float:
    present = table[table > -1]
    return float(present.mean()) if present.size else -1.0


def distinct_names(categories: Mapping[int, str]) -> list[str]:
    """The name of each category; those that two share are followed by the id."""
    uses = Counter(categories.values())
    return [name if uses[name] == 1 else f"{name} (id {id})" for id, name in categories.items()]
