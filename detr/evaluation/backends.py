"""The two programs that match detections to ground truth; both make the same tables to 1e-6."""

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detr.evaluation.coco_format import GroundTruth

_PACKAGES = {"pycocotools": "pycocotools", "faster_coco_eval": "faster-coco-eval"}


def check_backend(backend: str) -> None:
    """Check that an evaluation backend can run.

    Raises:
        ValueError: There is no backend of that name.
        ImportError: Its package is not installed.
    """
    if backend not in _PACKAGES:
        raise ValueError(f"backend={backend} is not an evaluation backend; choose one of {', '.join(_PACKAGES)}")
    if importlib.util.find_spec(backend) is None:
        raise ImportError(
            f"backend={backend} was asked for and its package is not installed; run "
            f"`pip install {_PACKAGES[backend]}`, or use backend=pycocotools"
        )


def match_tables(
    ground_truth: GroundTruth,
    detections: Sequence[dict[str, Any]],
    *,
    max_detections: Sequence[int],
    backend: str,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Match boxes and accumulate precision and recall.

    Args:
        ground_truth: All of its images count, whether they have detections or not.
        detections: From :func:`detr.evaluation.coco_format.number_results`.
        max_detections: Limits of detections an image and class, ascending.
        backend: "pycocotools" or "faster_coco_eval".

    Returns:
        precision (T, R, K, A, M) and recall (T, K, A, M); see :mod:`detr.evaluation.coco_metrics`.
    """
    check_backend(backend)
    # both programs report their progress on stdout, which belongs to the tool that called
    with contextlib.redirect_stdout(io.StringIO()):
        if backend == "pycocotools":
            evaluation = _run_pycocotools(ground_truth, detections, max_detections)
        else:
            evaluation = _run_faster_coco_eval(ground_truth, detections, max_detections)
    return np.asarray(evaluation["precision"]), np.asarray(evaluation["recall"])


def _run_pycocotools(
    ground_truth: GroundTruth, detections: Sequence[dict[str, Any]], max_detections: Sequence[int]
) -> dict[str, Any]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth_index, detection_index = COCO(), COCO()
    # loadRes indexes the first detection, so it cannot take an empty list; setting the dataset can
    truth_index.dataset = ground_truth.dataset()
    detection_index.dataset = {**ground_truth.dataset(), "annotations": list(detections)}
    truth_index.createIndex()
    detection_index.createIndex()
    evaluation = COCOeval(truth_index, detection_index, "bbox")
    evaluation.params.maxDets = list(max_detections)
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation.eval


def _run_faster_coco_eval(
    ground_truth: GroundTruth, detections: Sequence[dict[str, Any]], max_detections: Sequence[int]
) -> dict[str, Any]:
    from faster_coco_eval import COCO, COCOeval_faster

    truth_index = COCO(ground_truth.dataset())
    detection_index = COCO({**ground_truth.dataset(), "annotations": list(detections)})
    evaluation = COCOeval_faster(truth_index, detection_index, "bbox")
    evaluation.params.maxDets = list(max_detections)
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation.eval
