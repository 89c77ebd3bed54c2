"""Detections from the model's output, and their COCO average precision."""

from detr.evaluation.coco_evaluator import CocoEvaluator, evaluate_files
from detr.evaluation.coco_format import CocoResult, read_annotations, to_results, write_results
from detr.evaluation.coco_metrics import CocoMetrics
from detr.evaluation.postprocess import PostProcess, top_detections

__all__ = [
    "CocoEvaluator",
    "CocoMetrics",
    "CocoResult",
    "PostProcess",
    "evaluate_files",
    "read_annotations",
    "to_results",
    "top_detections",
    "write_results",
]
