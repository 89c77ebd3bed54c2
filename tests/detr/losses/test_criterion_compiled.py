"""The criterion's arithmetic compiled: the same loss and gradients, on few graphs whatever the numbers of boxes."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from detr.losses import HungarianMatcher, SetCriterion
from detr.structures import DetectorOutput, LayerOutput, Target


def make_problem(counts):
    generator = torch.Generator().manual_seed(sum(counts))

    def rand(*shape):
        return torch.rand(shape, generator=generator)

    targets = [
        Target(
            torch.randint(0, 11, (count,), generator=generator),
            rand(count, 4) * 0.4 + 0.1,
            image_id=i,
            orig_size=(9, 9),
        )
        for i, count in enumerate(counts)
    ]
    logits, boxes = rand(3, 2, 20, 11).requires_grad_(), rand(3, 2, 20, 4).requires_grad_()
    return DetectorOutput(logits, boxes, LayerOutput(rand(2, 50, 11), rand(2, 50, 4))), targets


@pytest.fixture
def graphs(monkeypatch):
    """A backend that counts graphs and keeps eager's arithmetic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize("solver", ["host", "device"])
def test_loss_and_gradients_are_the_plain_ones_and_graphs_settle(graphs, solver):
    plain = SetCriterion(num_classes=11, matcher=HungarianMatcher())
    compiled = SetCriterion(num_classes=11, matcher=HungarianMatcher(solver=solver))
    compiled.compile_arithmetic()
    num_graphs = []
    for counts in ((3, 2), (5, 3), (4, 19), (30, 2), (0, 3), (0, 0)):
        output, targets = make_problem(counts)
        expected = plain(output, targets, torch.tensor(3.0))
        found = compiled(output, targets, torch.tensor(3.0))
        torch.testing.assert_close(found.terms, expected.terms)
        torch.testing.assert_close(found.class_error, expected.class_error)
        inputs = (output.layer_logits, output.layer_boxes)
        gradients = [torch.autograd.grad(loss.total, inputs) for loss in (found, expected)]
        torch.testing.assert_close(*gradients)
        num_graphs.append(graphs.frame_count)
    assert num_graphs[0] > 0
    # after two sizes, only no box at all is new
    assert num_graphs[1] == num_graphs[-2]


@pytest.mark.parametrize("solver", ["host", "device"])
@torch._dynamo.config.patch(recompile_limit=64)
def test_graphs_settle_whether_or_not_queries_are_left_out(graphs, solver):
    """20 queries are reduced up to 2 boxes an image, 50 proposals up to 3."""
    criterion = SetCriterion(num_classes=11, matcher=HungarianMatcher(solver=solver))
    criterion.compile_arithmetic()
    num_graphs = []
    for counts in ((0, 0), (1, 0), (1, 1), (5, 2), (2, 2), (3, 2), (7, 0), (30, 2), (2, 0), (1, 0), (4, 4), (0, 2)):
        output, targets = make_problem(counts)
        criterion(output, targets, torch.tensor(3.0))
        num_graphs.append(graphs.frame_count)
    # no box, one, one in two images, several, and several among candidates; each for layers and proposals
    assert num_graphs[4] == num_graphs[-1] < 24
