"""Faults that others have reported and that no other test covers; docs/reliability.md lists where the rest are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detr.evaluation import CocoEvaluator, PostProcess
from detr.losses import HungarianMatcher, Matches, MatchingProblem, SetCriterion
from detr.structures import ClassTable, Detections, DetectorOutput, Target


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


class MatchedInOrder(HungarianMatcher):
    """Query r to box r in every layer, so that only the loss is looked at."""

    def match(self, problems: Any) -> list[Matches]:
        return [self._in_order(problem) for problem in problems]

    def _in_order(self, problem: MatchingProblem) -> Matches:
        rows = torch.arange(sum(problem.targets.counts))
        by_layer = rows.expand(len(problem.logits), -1)
        return Matches(torch.zeros_like(rows), by_layer, by_layer)


def test_the_loss_of_many_pairs_needs_memory_for_pairs_not_for_their_square():
    # 900 pairs in 7 layers: generalised IoU of all with all would be 7 x 900 x 900
    num_pairs, num_layers = 900, 7
    boxes = torch.rand(num_layers, 1, num_pairs, 4) * 0.4 + 0.2
    target = Target(torch.zeros(num_pairs, dtype=torch.int64), boxes[0, 0].clone(), image_id=0, orig_size=(64, 64))
    output = DetectorOutput(torch.zeros(num_layers, 1, num_pairs, 1), boxes)
    with LargestTensor() as largest:
        SetCriterion(num_classes=1, matcher=MatchedInOrder())(output, [target], 900.0)
    assert largest.num_elements <= 2 * num_layers * num_pairs * 4


def test_the_limit_of_detections_is_one_an_image_and_class():
    # 3 cats and 11 dogs, all found: at most 10 of each class count, not 10 of the image
    counts = {"cat": 3, "dog": 11}
    corners = torch.tensor([[20.0 * index, 0.0, 20.0 * index + 10, 10.0] for index in range(14)])
    labels = torch.tensor([0] * counts["cat"] + [1] * counts["dog"])
    ground_truth = {
        "images": [{"id": 1}],
        "categories": [{"id": 5, "name": "cat"}, {"id": 6, "name": "dog"}],
        "annotations": [
            {"id": 1 + index, "image_id": 1, "category_id": 5 + int(label), "bbox": [*box[:2].tolist(), 10, 10]}
            for index, (box, label) in enumerate(zip(corners, labels, strict=True))
        ],
    }
    evaluator = CocoEvaluator(ground_truth, ClassTable(("cat", "dog"), (5, 6)))
    evaluator.update([1], [Detections(torch.linspace(0.9, 0.5, 14), labels, corners)])
    metrics = evaluator.summarize().to_dict()
    assert metrics["AR10"] == pytest.approx((1 + 10 / 11) / 2)
    assert metrics["AR100"] == pytest.approx(1.0)


@pytest.mark.parametrize("num_classes", [2, 80])
def test_evaluation_reads_the_device_once_a_batch_whatever_the_classes(
    num_classes: int, monkeypatch: pytest.MonkeyPatch
):
    reads: list[str] = []
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__"):
        real = getattr(Tensor, name)

        def counted(tensor: Tensor, *arguments: Any, name: str = name, real: Any = real) -> Any:
            reads.append(name)
            return real(tensor, *arguments)

        monkeypatch.setattr(Tensor, name, counted)
    output = DetectorOutput(torch.randn(2, 3, 20, num_classes), torch.rand(2, 3, 20, 4))
    PostProcess()(output, torch.tensor([[64, 64]] * 3))
    assert reads == ["cpu"]
