"""Detections from the model's output, and their COCO average precision."""

from detr.evaluation.analysis import Analysis, ClassAnalysis, analyze_files
from detr.evaluation.coco_evaluator import CocoEvaluator, evaluate_files
from detr.evaluation.coco_format import CocoResult, read_annotations, to_results, write_results
from detr.evaluation.coco_metrics import CocoMetrics, format_ap
from detr.evaluation.errors import KINDS, ErrorAnalysis, Mistake
from detr.evaluation.postprocess import PostProcess, top_detections

__all__ = [
    "KINDS",
    "Analysis",
    "ClassAnalysis",
    "CocoEvaluator",
    "CocoMetrics",
    "CocoResult",
    "ErrorAnalysis",
    "Mistake",
    "PostProcess",
    "analyze_files",
    "evaluate_files",
    "format_ap",
    "read_annotations",
    "to_results",
    "top_detections",
    "write_results",
]
