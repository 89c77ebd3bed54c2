"""Detection and evaluation with a model of the training engine."""

from collections.abc import Callable
from typing import Any

import torch

from detr.engine.evaluate import detect, evaluate
from detr.engine.precision import Precision
from detr.evaluation import CocoEvaluator, PostProcess

CPU = torch.device("cpu")


def test_evaluation_leaves_the_mode_and_counts_every_image(detector: Callable[..., Any], data: Callable[..., Any]):
    model = detector().train()
    split = data()
    evaluator = CocoEvaluator(split.val_ground_truth(), split.class_table)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append((module.training, len(args[0]))))
    for _ in range(2):
        metrics = evaluate(model, split.val_loader(), evaluator, PostProcess(), precision=Precision(), device=CPU)
        assert 0 <= metrics.AP <= 1
    assert model.training
    assert seen == [(False, 2)] * 4
    assert {result["image_id"] for result in evaluator.gather_results()} == {1, 2, 3, 4}


def test_detection_keeps_no_graph(detector: Callable[..., Any], batches: Callable[..., Any]):
    [found] = detect(detector().eval(), batches([[1]])[0], PostProcess(5), precision=Precision(), device=CPU)
    assert not found.boxes.requires_grad
    assert len(found.scores) == 5
