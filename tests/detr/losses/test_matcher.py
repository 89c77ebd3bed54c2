"""The matcher against brute force, and on bad input."""

import itertools
import logging

import pytest
import torch
from torchvision.ops import box_convert, generalized_box_iou

from detr.losses import HungarianMatcher, MatchingProblem, PaddedTargets
from detr.structures import Target

SOLVERS = ["host", "device"]


def make_target(labels, boxes=None, image_id=7) -> Target:
    labels = torch.tensor(labels, dtype=torch.int64)
    if boxes is None:
        boxes = torch.rand(len(labels), 4) * 0.4 + 0.1
    return Target(labels, torch.as_tensor(boxes).reshape(-1, 4), image_id=image_id, orig_size=(80, 100))


def problem(logits, boxes, targets) -> MatchingProblem:
    return MatchingProblem(logits, boxes, PaddedTargets.from_targets(targets, logits.device))


def random_predictions(num_layers=2, num_images=3, num_queries=6, num_classes=4):
    logits = torch.randn(num_layers, num_images, num_queries, num_classes)
    boxes = torch.rand(num_layers, num_images, num_queries, 4) * 0.4 + 0.1
    return logits, boxes


def plain_cost(logits, boxes, target):
    """The cost of one layer and image, from the recipe's formula and torchvision's pairwise GIoU."""
    p = logits.sigmoid()
    positive = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log()
    negative = 0.75 * p**2 * -(1 - p + 1e-8).log()
    class_cost = (positive - negative)[:, target.labels]
    distance = torch.cdist(boxes, target.boxes, p=1)
    giou = generalized_box_iou(box_convert(boxes, "cxcywh", "xyxy"), box_convert(target.boxes, "cxcywh", "xyxy"))
    return 2 * class_cost + 5 * distance - 2 * giou


def test_cost_is_the_recipe_in_every_layer_and_image():
    torch.manual_seed(0)
    logits, boxes = random_predictions()
    targets = [make_target([0, 3]), make_target([]), make_target([2])]
    cost = HungarianMatcher().cost(problem(logits, boxes, targets))
    assert cost.shape == (2, 3, 6, 2)
    for layer, image in itertools.product(range(2), range(3)):
        expected = plain_cost(logits[layer, image], boxes[layer, image], targets[image])
        torch.testing.assert_close(cost[layer, image, :, : len(targets[image].labels)], expected)


@pytest.mark.parametrize("solver", SOLVERS)
def test_assignment_is_the_cheapest_by_brute_force(solver):
    torch.manual_seed(1)
    logits, boxes = random_predictions()
    targets = [make_target([0, 3, 1]), make_target([]), make_target([2, 2])]
    matches = HungarianMatcher(solver=solver)(problem(logits, boxes, targets))
    assert matches.image.tolist() == [0, 0, 0, 2, 2]
    for layer, image in itertools.product(range(2), (0, 2)):
        cost = plain_cost(logits[layer, image], boxes[layer, image], targets[image])
        count = cost.shape[1]
        cheapest = min(
            sum(cost[query, i].item() for i, query in enumerate(queries))
            for queries in itertools.permutations(range(6), count)
        )
        of_image = matches.image == image
        found = cost[matches.query[layer, of_image], matches.target[layer, of_image]].sum().item()
        assert found == pytest.approx(cheapest, abs=1e-5)


@pytest.mark.parametrize("counts", [(2, 0, 3), (6, 1, 6), (9, 2, 0), (7, 8, 9), (0, 0, 0)])
def test_both_solvers_find_the_same_pairs(counts):
    """Also where images have more boxes than the six queries."""
    torch.manual_seed(2)
    logits, boxes = random_predictions()
    one = problem(logits, boxes, [make_target([0] * count) for count in counts])
    host, device = (HungarianMatcher(solver=solver)(one) for solver in SOLVERS)
    assert torch.equal(host.image, device.image)
    for layer in range(len(logits)):
        pairs = [
            sorted(zip(*(t.tolist() for t in (m.image, m.query[layer], m.target[layer])), strict=True))
            for m in (host, device)
        ]
        assert pairs[0] == pairs[1]
        assert len(set(pairs[0])) == sum(min(count, 6) for count in counts)


@pytest.mark.parametrize("solver", SOLVERS)
def test_batch_without_boxes_gives_empty_matches(solver):
    logits, boxes = random_predictions(num_images=2)
    matches = HungarianMatcher(solver=solver)(problem(logits, boxes, [make_target([]), make_target([])]))
    assert matches.image.shape == (0,)
    assert matches.query.shape == matches.target.shape == (2, 0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_more_boxes_than_queries_is_said_once(solver, caplog):
    torch.manual_seed(0)
    matcher = HungarianMatcher(solver=solver)
    logits, boxes = random_predictions(num_images=1, num_queries=3)
    targets = [make_target([0, 1, 2, 3, 0], image_id=42)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            matches = matcher(problem(logits, boxes, targets))
    assert matches.query.shape == (2, 3)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1
    assert "image 42 has 5 boxes but the model has 3 queries" in messages[0]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_predictions_are_matched_last_and_reported(bad, solver, caplog):
    torch.manual_seed(0)
    matcher = HungarianMatcher(solver=solver)
    logits, boxes = random_predictions(num_layers=1, num_images=1, num_queries=4)
    boxes[0, 0, 1] = bad
    targets = [make_target([0, 1, 2], image_id=9)]
    with caplog.at_level(logging.WARNING):
        matches = matcher(problem(logits, boxes, targets))
        if solver == "device":
            # what the device found is read when it is there
            assert caplog.text == ""
            matcher(problem(logits, boxes.nan_to_num(0.5, 0.5, 0.5), targets))
    assert 1 not in matches.query[0].tolist()
    assert matcher.num_nonfinite_batches == 1
    assert "images [9]" in caplog.text


@pytest.mark.parametrize("solver", SOLVERS)
def test_everything_non_finite_still_matches(solver):
    matcher = HungarianMatcher(solver=solver)
    logits, boxes = random_predictions(num_layers=1, num_images=1, num_queries=4)
    matches = matcher(problem(logits * float("nan"), boxes, [make_target([0, 1])]))
    assert matches.query.shape == (1, 2)


def test_degenerate_boxes_have_finite_costs():
    """A prediction and a box without area gave NaN in the original (recipe, quirk Q10)."""
    logits = torch.zeros(1, 1, 2, 4)
    boxes = torch.tensor([[[[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.2, 0.2]]]])
    targets = [make_target([0], [[0.5, 0.5, 0.0, 0.0]])]
    matcher = HungarianMatcher()
    assert matcher.cost(problem(logits, boxes, targets)).isfinite().all()
    matcher(problem(logits, boxes, targets))
    assert matcher.num_nonfinite_batches == 0


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("label", "num_classes"), [(4, 4), (90, 4)])
def test_label_beyond_the_classes(label, num_classes, solver):
    logits, boxes = random_predictions(num_images=2, num_classes=num_classes)
    targets = [make_target([0]), make_target([1, label], image_id=33)]
    with pytest.raises(ValueError, match=rf"image 33: label 1 is {label}; it must be in \[0, 4\)"):
        HungarianMatcher(solver=solver)(problem(logits, boxes, targets))


@pytest.mark.parametrize("solver", SOLVERS)
def test_target_boxes_changed_after_they_were_checked(solver):
    logits, boxes = random_predictions(num_images=1)
    target = make_target([0], image_id=5)
    target.boxes[0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"image 5: box 0 is .*nan.*must be finite"):
        HungarianMatcher(solver=solver)(problem(logits, boxes, [target]))


@pytest.mark.parametrize("solver", SOLVERS)
def test_problems_solved_together_are_those_solved_alone(solver):
    torch.manual_seed(0)
    targets = [make_target([0, 3, 1]), make_target([]), make_target([2, 2])]
    problems = [problem(*random_predictions(num_layers=k, num_queries=q), targets) for k, q in ((2, 6), (1, 40))]
    together = HungarianMatcher(solver=solver).match(problems)
    for one, alone in zip(together, map(HungarianMatcher(solver=solver), problems), strict=True):
        assert torch.equal(one.query, alone.query)
        assert torch.equal(one.target, alone.target)
        assert torch.equal(one.image, alone.image)


@pytest.mark.parametrize(("solver", "num_copies"), [("host", 1), ("device", 0)])
def test_copies_to_the_host_for_all_problems(solver, num_copies, monkeypatch):
    """Each copy is a place where a training step waits for the GPU."""
    copies = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or cpu(tensor))
    targets = [make_target([0, 3, 1]), make_target([]), make_target([2, 2])]
    problems = [problem(*random_predictions(), targets), problem(*random_predictions(), targets)]
    HungarianMatcher(solver=solver).match(problems)
    assert len(copies) == num_copies


def test_proposals_are_checked_as_objects_of_one_class():
    """Labels of the detector's classes are out of range for the proposals' only class."""
    logits, boxes = random_predictions(num_layers=1, num_images=1, num_classes=1)
    targets = PaddedTargets.from_targets([make_target([2, 3])], logits.device).as_objects()
    matches = HungarianMatcher(solver="device")(MatchingProblem(logits, boxes, targets))
    assert matches.query.shape == (1, 2)


@pytest.mark.parametrize(
    ("device", "has_kernel", "on_device"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_auto_solves_where_the_kernel_runs(device, has_kernel, on_device, monkeypatch):
    monkeypatch.setattr("ops.assignment.functional._HAS_TRITON", has_kernel)
    assert HungarianMatcher()._solves_on_device(torch.device(device)) == on_device
    for solver in SOLVERS:
        assert HungarianMatcher(solver=solver)._solves_on_device(torch.device(device)) == (solver == "device")


def test_a_solver_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="host or device; got 'gpu'"):
        HungarianMatcher(solver="gpu")


def test_all_weights_zero_is_refused():
    with pytest.raises(ValueError, match="at least one of cost_class"):
        HungarianMatcher(cost_class=0, cost_bbox=0, cost_giou=0)
