"""Pictures and tables of a run, for loggers that take them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchvision.ops import box_convert

from detr.data import DetectionDataset, Sample
from detr.engine.restore import Progress
from detr.evaluation import CocoEvaluator, CocoMetrics, CocoResult
from detr.structures import ClassTable, Detections
from detr.telemetry.loggers import MediaLogger
from detr.visualize import draw_comparison

_logger = logging.getLogger(__name__)


class EvaluationMedia:
    """After each evaluation: the same few validation images with what was found on them, and the AP of each class.

    For rank 0 alone. It costs no pass of the model: the detections are those that the evaluation scored.

    Args:
        logger: Takes the pictures and tables.
        dataset: Of the validation split.
        num_images: How many images, spread over the dataset; 0 for none.
        min_score: Least score of the detections drawn.
    """

    def __init__(
        self, logger: MediaLogger, dataset: DetectionDataset, *, num_images: int = 8, min_score: float = 0.3
    ) -> None:
        self._logger = logger
        self._dataset = dataset
        num_images = min(num_images, len(dataset))
        # evenly over the dataset, whose neighbours are often alike
        self._indices = [index * len(dataset) // num_images for index in range(num_images)]
        self._min_score = min_score
        self._samples: list[Sample] | None = None

    def log(self, evaluator: CocoEvaluator, metrics: CocoMetrics, progress: Progress, *, is_last: bool) -> None:
        """Log the evaluation that just ended.

        Args:
            evaluator: After `summarize`.
            metrics: What it returned.
            progress: Of the run, this evaluation included.
            is_last: Whether the run ends with it: then its summary is logged too.
        """
        step = progress.global_step
        self._logger.log_images(step, "val/truth_and_predictions", self._pictures(evaluator))
        rows = [[name, evaluator.num_objects[name], ap] for name, ap in metrics.per_class.items()]
        self._logger.log_table(step, "val/classes", ["class", "objects", "AP"], rows)
        if is_last:
            self._logger.log_table(step, "summary", ["name", "value"], summary_rows(metrics, progress))

    def _pictures(self, evaluator: CocoEvaluator) -> dict[str, Any]:
        if self._samples is None:
            self._samples = self._load()
        table = evaluator.class_table
        pictures = {}
        for image, target in self._samples:
            found = detections_of_results(evaluator.results_of(target.image_id), table)
            try:
                picture = draw_comparison(image, target, found, table.names, min_score=self._min_score)
            except (ValueError, OSError) as error:
                _logger.warning("no picture of validation image %d: %s", target.image_id, error)
                continue
            pictures[f"image {target.image_id}"] = np.asarray(picture)  # (h, w, 3)
        return pictures

    def _load(self) -> list[Sample]:
        """The images, once a run: some hundred kilobytes to a few megabytes each."""
        samples = []
        for index in self._indices:
            try:
                samples.append(self._dataset.load(index, None))
            except (ValueError, OSError) as error:
                # the evaluation is done and scored; a picture of it is not worth a run
                _logger.warning("no picture of a validation image: %s", error)
        return samples


def detections_of_results(results: Sequence[CocoResult], class_table: ClassTable) -> Detections:
    """Detections of one image, best first, from COCO's result format."""
    label_of = {category_id: label for label, category_id in enumerate(class_table.category_ids)}
    scores = torch.tensor([result["score"] for result in results], dtype=torch.float32)
    labels = torch.tensor([label_of[result["category_id"]] for result in results], dtype=torch.int64)
    boxes = torch.tensor([result["bbox"] for result in results], dtype=torch.float32).reshape(-1, 4)
    order = scores.argsort(descending=True, stable=True)
    return Detections(scores[order], labels[order], box_convert(boxes, "xywh", "xyxy")[order])


def summary_rows(metrics: CocoMetrics, progress: Progress) -> list[list[str | float]]:
    """What a run came to, name and number: how long it trained, its best AP, and the last evaluation."""
    best: Mapping[str, Any] = progress.best
    rows: list[list[str | float]] = [
        ["epochs", float(progress.epoch)],
        ["optimizer steps", float(progress.global_step)],
        ["best AP", float(best["AP"])],
        ["epoch of the best AP", float(best["epoch"])],
    ]
    return rows + [[f"last {name}", value] for name, value in metrics.numbers().items() if value >= 0]
