"""The evaluator of one rank; two ranks are in test_two_ranks."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.evaluation import CocoEvaluator, evaluate_files, to_results, write_results
from detr.structures import ClassTable, Detections

# as a 91-row table: row 1 has no category
TABLE = ClassTable(names=("cat", "", "dog"), category_ids=(4, 5, 90))
DATASET: dict[str, Any] = {
    "images": [{"id": 10}, {"id": 20}],
    "categories": [{"id": 90, "name": "dog"}, {"id": 4, "name": "cat"}],
    "annotations": [
        {"id": 0, "image_id": 10, "category_id": 4, "bbox": [10, 20, 30, 40]},
        {"id": 1, "image_id": 20, "category_id": 90, "bbox": [0, 0, 50, 50]},
    ],
}
NOTHING = Detections(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
CAT = Detections(torch.tensor([0.9]), torch.tensor([0]), torch.tensor([[10.0, 20.0, 40.0, 60.0]]))
DOG = Detections(torch.tensor([0.8]), torch.tensor([2]), torch.tensor([[0.0, 0.0, 50.0, 50.0]]))


@pytest.fixture
def evaluator() -> CocoEvaluator:
    return CocoEvaluator(DATASET, TABLE)


def test_perfect_detections_score_1(evaluator: CocoEvaluator):
    evaluator.update([20, 10], [DOG, CAT])
    metrics = evaluator.summarize()
    assert pytest.approx(1.0) == metrics.AP
    assert metrics.per_class == pytest.approx({"cat": 1.0, "dog": 1.0})


def test_the_ground_truth_is_left_as_it_is():
    dataset = copy.deepcopy(DATASET)
    evaluator = CocoEvaluator(dataset, TABLE)
    evaluator.update([10, 20], [CAT, DOG])
    evaluator.summarize()
    assert dataset == DATASET


def test_images_that_were_not_evaluated_count_as_misses(evaluator: CocoEvaluator, caplog: pytest.LogCaptureFixture):
    evaluator.update([10], [CAT])
    with caplog.at_level(logging.WARNING):
        metrics = evaluator.summarize()
    assert pytest.approx(0.5) == metrics.AP
    assert metrics.per_class == pytest.approx({"cat": 1.0, "dog": 0.0})
    assert "1 of the 2 images" in caplog.text


def test_images_without_detections_are_no_reason_to_warn(evaluator: CocoEvaluator, caplog: pytest.LogCaptureFixture):
    evaluator.update([10, 20], [NOTHING, NOTHING])
    with caplog.at_level(logging.WARNING):
        assert evaluator.summarize().AP == 0.0
    assert caplog.text == ""


def test_a_second_evaluation_starts_from_nothing(evaluator: CocoEvaluator):
    evaluator.update([10, 20], [CAT, DOG])
    assert pytest.approx(1.0) == evaluator.summarize().AP
    with pytest.raises(ValueError, match=r"image 10 was given before; call reset\(\)"):
        evaluator.update([10], [NOTHING])
    evaluator.reset()
    evaluator.update([10, 20], [NOTHING, NOTHING])
    assert evaluator.summarize().AP == 0.0


def test_rows_without_a_category_are_left_out(evaluator: CocoEvaluator):
    unnamed_first = Detections(
        torch.tensor([0.99, 0.9]),
        torch.tensor([1, 0]),
        torch.tensor([[0.0, 0.0, 9.0, 9.0], [10.0, 20.0, 40.0, 60.0]]),
    )
    evaluator.update([10, 20], [unnamed_first, DOG])
    assert {result["category_id"] for result in evaluator.gather_results()} == {4, 90}
    assert pytest.approx(1.0) == evaluator.summarize().AP


def test_written_detections_score_the_same(evaluator: CocoEvaluator, tmp_path: Path):
    generator = torch.Generator().manual_seed(1)
    shift = torch.randn(20, 4, generator=generator)
    noisy_dogs = Detections(
        torch.rand(20, generator=generator).sort(descending=True).values,
        torch.full((20,), 2),
        DOG.boxes + shift,
    )
    evaluator.update([10, 20], [CAT, noisy_dogs])
    write_results(tmp_path / "predictions.json", evaluator.gather_results())
    (tmp_path / "annotations.json").write_text(json.dumps(DATASET))
    from_files = evaluate_files(tmp_path / "annotations.json", tmp_path / "predictions.json")
    assert from_files == evaluator.summarize()
    assert 0 < from_files.AP < 1
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_results_carry_original_category_ids_and_xywh():
    (result,) = to_results("photo.jpg", CAT, TABLE)
    assert result == {
        "image_id": "photo.jpg",
        "category_id": 4,
        "bbox": [10.0, 20.0, 30.0, 40.0],
        "score": pytest.approx(0.9),
    }


@pytest.mark.parametrize(
    ("image_id", "detections", "message"),
    [
        (11, CAT, r"image id 11 is not among the 2 images"),
        (10, Detections(CAT.scores, torch.tensor([3]), CAT.boxes), r"labels must be in \[0, 3\).*found 3"),
        (10, Detections(CAT.scores, torch.tensor([-1]), CAT.boxes), r"labels must be in \[0, 3\)"),
        (10, Detections(CAT.scores * float("nan"), CAT.labels, CAT.boxes), r"image 10: .*NaN or infinity"),
        (10, Detections(CAT.scores, CAT.labels, CAT.boxes / 0), r"NaN or infinity"),
    ],
)
def test_bad_updates_are_refused(evaluator: CocoEvaluator, image_id: int, detections: Detections, message: str):
    with pytest.raises(ValueError, match=message):
        evaluator.update([image_id], [detections])


def test_ids_and_detections_must_be_as_many(evaluator: CocoEvaluator):
    with pytest.raises(ValueError, match="2 image ids for the detections of 1 images"):
        evaluator.update([10, 20], [CAT])


def test_a_class_table_of_another_dataset_is_refused():
    with pytest.raises(ValueError, match="none in common"):
        CocoEvaluator(DATASET, ClassTable(names=("cat",), category_ids=(1,)))
    with pytest.raises(ValueError, match="4: 'bird' against 'cat'"):
        CocoEvaluator(DATASET, ClassTable(names=("bird", "dog"), category_ids=(4, 90)))


def test_categories_the_model_does_not_know_are_reported(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        CocoEvaluator(DATASET, ClassTable(names=("cat",), category_ids=(4,)))
    assert "1 categories of the annotation file are unknown to the model" in caplog.text
    assert "90 dog" in caplog.text


def test_both_backends_agree_on_many_noisy_detections():
    generator = torch.Generator().manual_seed(0)
    num_images, num_classes = 30, 4
    annotations = []
    for image_id in range(num_images):
        for _ in range(int(torch.randint(0, 9, (), generator=generator))):
            x, y = (torch.rand(2, generator=generator) * 300).tolist()
            w, h = (torch.rand(2, generator=generator) * 150 + 2).tolist()
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": image_id,
                    "category_id": int(torch.randint(0, num_classes, (), generator=generator)),
                    "bbox": [x, y, w, h],
                    "iscrowd": int(torch.rand((), generator=generator) < 0.1),
                }
            )
    dataset = {
        "images": [{"id": image_id} for image_id in range(num_images)],
        "categories": [{"id": id, "name": f"class {id}"} for id in range(num_classes)],
        "annotations": annotations,
    }
    table = ClassTable(names=tuple(f"class {id}" for id in range(num_classes)), category_ids=tuple(range(num_classes)))
    metrics = []
    for backend in ("pycocotools", "faster_coco_eval"):
        evaluator = CocoEvaluator(dataset, table, backend=backend, max_detections=(1, 10, 100))
        generator.manual_seed(2)
        for image_id in range(num_images):
            truth = [a for a in annotations if a["image_id"] == image_id]
            xywh = torch.tensor([a["bbox"] for a in truth] or torch.zeros(0, 4).tolist()).reshape(-1, 4)
            boxes = torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1).repeat(3, 1)
            T = len(boxes)
            # coarse scores, so that many are equal
            scores = (torch.rand(T, generator=generator) * 20).round() / 20
            labels = torch.tensor([a["category_id"] for a in truth] * 3, dtype=torch.int64)
            boxes = boxes + torch.randn(T, 4, generator=generator) * 6
            evaluator.update([image_id], [Detections(scores, labels, boxes)])
        metrics.append(evaluator.summarize())
    assert 0.05 < metrics[0].AP < 0.95
    assert metrics[1].numbers() == pytest.approx(metrics[0].numbers(), abs=1e-6)
    assert metrics[1].per_class == pytest.approx(metrics[0].per_class, abs=1e-6)
