"""Fewer queries, the same cheapest assignment."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from detr.losses import HungarianMatcher, SetCriterion
from detr.losses.candidates import cheapest_candidates
from detr.losses.matcher import MatchingProblem
from detr.losses.padded_targets import PaddedTargets
from detr.structures import DetectorOutput, LayerOutput, Target


def random_cost(kind, T, Lq=2300):
    generator = torch.Generator().manual_seed(T)
    cost = torch.rand(2, 3, Lq, T, generator=generator) * 20 - 10
    if kind == "all boxes want the same queries":
        cost = cost[..., :1] + 1e-3 * cost
    elif kind == "ties":
        cost = cost.round()
    elif kind == "one cost is huge":
        cost[0, 0, 0, 0] = 3e38
    return cost


@pytest.mark.parametrize("T", [1, 2, 7, 13])
@pytest.mark.parametrize("kind", ["random", "all boxes want the same queries", "ties", "one cost is huge"])
def test_the_cheapest_assignment_costs_the_same(kind, T):
    cost = random_cost(kind, T)
    candidates, queries = cheapest_candidates(cost)
    assert candidates.shape == (2, 3, T * T, T)
    assert candidates.isfinite().all()
    for layer in range(2):
        for image in range(3):
            # images with fewer boxes than others use the first columns
            for count in {T, (T + 1) // 2}:
                full = cost[layer, image, :, :count].double().numpy()
                rows, columns = linear_sum_assignment(candidates[layer, image, :, :count].double().numpy())
                found = queries[layer, image, rows].numpy()
                assert len(set(found)) == count
                expected = full[linear_sum_assignment(full)].sum()
                np.testing.assert_allclose(full[found, columns].sum(), expected, rtol=1e-6)


def test_little_is_left_as_it_is():
    for cost in (
        torch.rand(1, 1, 3000, 0),
        torch.rand(1, 2, 300, 7),
        torch.rand(1, 2, 2096, 7),
        torch.rand(1, 2, 5, 9),
    ):
        kept, queries = cheapest_candidates(cost)
        assert kept is cost
        assert queries is None
    assert cheapest_candidates(torch.rand(1, 2, 2097, 7))[1] is not None


class TestMatcher:
    """Against the matcher without the reduction."""

    @pytest.fixture
    def problem(self):
        generator = torch.Generator().manual_seed(3)
        targets = [
            Target(
                torch.randint(0, 4, (count,), generator=generator),
                torch.rand(count, 4, generator=generator) * 0.5 + 0.2,
                image_id=count,
                orig_size=(9, 9),
            )
            for count in (5, 0, 11)
        ]
        return MatchingProblem(
            torch.randn(2, 3, 2200, 4, generator=generator),
            torch.rand(2, 3, 2200, 4, generator=generator),
            PaddedTargets.from_targets(targets, torch.device("cpu")),
        )

    @pytest.mark.parametrize("solver", ["host", "device"])
    def test_finds_the_same_pairs(self, problem, solver, monkeypatch):
        matches = HungarianMatcher(solver=solver)(problem)
        assert matches.image.tolist() == [0] * 5 + [2] * 11
        monkeypatch.setattr("detr.losses.matcher.cheapest_candidates", lambda cost: (cost, None))
        expected = HungarianMatcher(solver=solver)(problem)
        for given, wanted in zip(pairs(matches), pairs(expected), strict=True):
            assert given == wanted

    @pytest.mark.parametrize("solver", ["host", "device"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_queries_that_are_not_finite_come_last(self, problem, solver, value, caplog):
        boxes = problem.boxes.clone()
        boxes[:, 2, :2185] = value
        matcher = HungarianMatcher(solver=solver)
        matches = matcher(replace(problem, boxes=boxes))
        assert (matches.query[:, matches.image == 2] >= 2185).all()
        if solver == "device":
            matcher(problem)  # which reports the step before
        # of all queries and boxes, padding included
        assert f"{2 * 2185 * 11} of {2 * 3 * 2200 * 11} costs are not finite" in caplog.text


def pairs(matches):
    """The pairs of each layer, as a set."""
    return [
        set(zip(matches.image.tolist(), query.tolist(), target.tolist(), strict=True))
        for query, target in zip(matches.query, matches.target, strict=True)
    ]


@pytest.mark.parametrize("solver", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fault", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "counts",
    [(0, 0), (1, 0), (1, 1), (4, 2), (5, 1), (8, 8), (9, 3), (22, 23), (70, 3)],
    ids=lambda counts: str(counts),
)
def test_the_losses_are_those_of_all_queries(counts, fault, dtype, solver, monkeypatch):
    """Layers of 60 queries and 2,100 proposals: reduced up to 3 and up to 22 boxes, and more boxes than queries."""
    generator = torch.Generator().manual_seed(sum(counts))

    def predictions(*shape):
        logits = torch.randn(*shape, 1, generator=generator, dtype=dtype)
        boxes = torch.randn(*shape, 4, generator=generator, dtype=dtype).sigmoid()
        if fault is not None:
            logits[torch.rand(shape, generator=generator) < 0.9] = fault
        return logits, boxes

    targets = [
        Target(
            torch.zeros(count, dtype=torch.int64),
            torch.rand(count, 4, generator=generator) * 0.5 + 0.2,
            image_id=count,
            orig_size=(9, 9),
        )
        for count in counts
    ]
    output = DetectorOutput(*predictions(3, 2, 60), LayerOutput(*predictions(2, 2100)))
    found = SetCriterion(num_classes=1, matcher=HungarianMatcher(solver=solver))(output, targets, 3.0)
    monkeypatch.setattr("detr.losses.matcher.cheapest_candidates", lambda cost: (cost, None))
    expected = SetCriterion(num_classes=1, matcher=HungarianMatcher(solver=solver))(output, targets, 3.0)
    torch.testing.assert_close(found.terms, expected.terms, equal_nan=True)
    torch.testing.assert_close(found.class_error, expected.class_error)
