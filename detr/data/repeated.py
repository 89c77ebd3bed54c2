"""A dataset several times over."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from detr.data.dataset import DetectionDataset, Sample
from detr.structures import ClassTable


class RepeatedDataset:
    """`dataset`, `times` over: an epoch of a small set becomes as long as one of a large set.

    Args:
        dataset: What to repeat; its ground truth stays as it is.
        times: At least 1.
    """

    def __init__(self, dataset: DetectionDataset, times: int) -> None:
        if times < 1:
            raise ValueError(f"a dataset can be repeated 1 or more times; got {times}")
        self._dataset = dataset
        self._times = times

    @property
    def class_table(self) -> ClassTable:
        return self._dataset.class_table

    def __len__(self) -> int:
        return len(self._dataset) * self._times

    def load(self, index: int, batch_draw: float | None, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._dataset.load(index % len(self._dataset), batch_draw)

    def original(self, file_name: str, /) -> Tensor:
        return self._dataset.original(file_name)

    def aspects(self) -> NDArray[np.float64]:
        return np.tile(self._dataset.aspects(), self._times)

    def repeat_factors(self, threshold: float, /) -> NDArray[np.float64]:
        return np.tile(self._dataset.repeat_factors(threshold), self._times)

    def coco_ground_truth(self) -> dict[str, Any]:
        return self._dataset.coco_ground_truth()
