"""Kinds of mistakes, each with the smallest case that makes it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detr.evaluation.analysis import analyze_files
from detr.evaluation.coco_evaluator import evaluate_files
from detr.evaluation.coco_format import number_results, prepare_ground_truth
from detr.evaluation.errors import KINDS, ErrorAnalysis, analyze_errors, overlaps

CAT, DOG = 3, 7
BOX = [10, 10, 20, 20]
SHIFTED = [20, 10, 20, 20]  # IoU 1/3 with BOX


def dataset(objects: list[dict[str, Any]]) -> dict[str, Any]:
    annotations = [{"id": number, "image_id": 1, "bbox": BOX} | each for number, each in enumerate(objects)]
    categories = [{"id": CAT, "name": "cat"}, {"id": DOG, "name": "dog"}]
    return {"images": [{"id": 1}, {"id": 2}], "annotations": annotations, "categories": categories}


def analyze(objects: list[dict[str, Any]], detections: list[dict[str, Any]]) -> ErrorAnalysis:
    ground_truth = prepare_ground_truth(dataset(objects))
    found = [{"image_id": 1, "category_id": CAT, "bbox": BOX, "score": 0.9} | each for each in detections]
    return analyze_errors(ground_truth, number_results(found, ground_truth))


@pytest.mark.parametrize(
    ("objects", "detections", "num_correct", "expected"),
    [
        ([{"category_id": CAT}], [{}], 1, {}),
        ([{"category_id": CAT}], [{}, {"score": 0.5}], 1, {"duplicate": 1}),
        # the object it mistook is not missed as well
        ([{"category_id": DOG}], [{}], 0, {"classification": 1}),
        ([{"category_id": CAT, "bbox": SHIFTED}], [{}], 0, {"localisation": 1}),
        ([{"category_id": DOG, "bbox": SHIFTED}], [{}], 0, {"both": 1, "missed": 1}),
        ([], [{}], 0, {"background": 1}),
        ([{"category_id": CAT}], [], 0, {"missed": 1}),
        ([{"category_id": CAT}], [{"score": 0.29}], 0, {"missed": 1}),
        ([{"category_id": CAT, "bbox": BOX}], [{"image_id": 2}], 0, {"background": 1, "missed": 1}),
        # on a crowd a detection is neither right nor wrong, and nobody misses a crowd
        ([{"category_id": CAT, "iscrowd": 1, "bbox": [0, 0, 100, 100]}], [{}, {}], 0, {}),
        ([{"category_id": DOG, "iscrowd": 1, "bbox": [0, 0, 100, 100]}], [{}], 0, {"background": 1}),
    ],
)
def test_kinds(objects: list, detections: list, num_correct: int, expected: dict[str, int]):
    errors = analyze(objects, detections)
    assert errors.num_correct == num_correct
    assert errors.counts() == dict.fromkeys(KINDS, 0) | expected


def test_the_better_detection_is_the_right_one():
    errors = analyze([{"category_id": CAT}], [{"score": 0.4}, {"score": 0.8, "bbox": [10, 10, 20, 18]}])
    [mistake] = errors.mistakes
    assert mistake.score == 0.4
    assert mistake.true_category_id == CAT
    assert errors.worst_images(5) == [(1, 1)]


def test_confusion():
    errors = analyze(
        [
            {"category_id": CAT},
            {"category_id": DOG, "bbox": [50, 50, 20, 20]},
            {"category_id": DOG, "bbox": [80, 0, 9, 9]},
        ],
        [{"category_id": DOG}, {"bbox": [50, 50, 20, 20], "category_id": DOG}, {"bbox": [0, 80, 5, 5]}],
    )
    # rows: cat, dog, nothing; columns: cat, dog, missed
    assert errors.confusion.tolist() == [[0, 1, 0], [0, 1, 1], [1, 0, 0]]


def test_overlaps():
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 0, 0]])
    iou, covered = overlaps(boxes, np.array([[5.0, 0, 10, 10], [0, 0, 20, 10]]))
    assert iou[0].tolist() == pytest.approx([1 / 3, 0.5])
    assert covered[0].tolist() == pytest.approx([0.5, 1.0])
    assert iou[1].tolist() == covered[1].tolist() == [0, 0]


def test_classes_add_up_to_the_metrics(shared_dir: Path):
    folder = shared_dir / "data" / "cocoapi-eval"
    annotations, detections = (next(folder.rglob(pattern)) for pattern in ("instances_val2014*.json", "*results*.json"))
    analysis = analyze_files(annotations, detections)
    assert analysis.metrics.to_dict() == evaluate_files(annotations, detections).to_dict()
    present = [each.AP for each in analysis.classes if each.AP is not None]
    assert np.mean(present) == pytest.approx(analysis.metrics.AP)
    small = [each.AP_small for each in analysis.classes if each.AP_small is not None]
    assert np.mean(small) == pytest.approx(analysis.metrics.APs)
    singles = [each for each in json.loads(annotations.read_text())["annotations"] if not each["iscrowd"]]
    assert analysis.errors.confusion[:-1].sum() == len(singles)
    json.dumps(analysis.to_dict(), allow_nan=False)
