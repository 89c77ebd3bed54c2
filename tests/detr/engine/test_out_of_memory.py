"""A step that does not fit: what is said, and the same gradients in halves. Memory is counted in images here."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.distributed import DistributedContext
from detr.engine.out_of_memory import out_of_memory_message
from detr.engine.settings import TrainerSettings
from detr.engine.step import train_step


def limit_images(model: torch.nn.Module, num_images: int) -> list[int]:
    """Let `model` take so many images at once, and record how many it is given."""
    given: list[int] = []

    def check(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        given.append(len(arguments[0]))
        if len(arguments[0]) > num_images:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(check)
    return given


def test_in_halves_the_gradients_are_the_same(
    detector: Callable[..., Any], train_state: Callable[..., Any], batches: Callable[..., Any]
):
    start = detector().to(torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        # at the start a head's last layer is zero and queries have equal costs, between which rounding decides
        for parameter in start.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    window = batches([[3, 0, 1, 2, 1], [2, 2]])
    whole, limited = copy.deepcopy(start), copy.deepcopy(start)
    expected = train_step(train_state(whole, max_grad_norm=None), window)
    given = limit_images(limited, 2)
    result = train_step(train_state(limited, max_grad_norm=None, retry_oom=True), window)
    # 5 fail; then 2 fit, 3 fail; at last nothing is above 2
    assert given == [5, 2, 3, 1, 1, 1, 2, 1, 1]
    assert result.num_images == expected.num_images == 7
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-9, atol=0)
    for (name, one), other in zip(whole.named_parameters(), limited.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_what_does_not_fit_alone_raises(train_state: Callable[..., Any], batches: Callable[..., Any]):
    state = train_state(retry_oom=True)
    limit_images(state.detector, 0)
    with pytest.raises(torch.OutOfMemoryError):
        train_step(state, batches([[2, 1]]))


def test_without_the_switch_it_says_what_did_not_fit(trainer: Callable[..., Any], tmp_path: Path):
    run = trainer(tmp_path)
    limit_images(run.state.detector, 1)
    with pytest.raises(MemoryError) as error:
        run.fit()
    for words in ("2 images padded to 64x64 px", "boxes ", "image ids ", "data.batch_size", "trainer.retry_oom=true"):
        assert words in str(error.value)


class Graphs:
    """Captured passes that leave room for `num_images` images once all of them are given up."""

    def __init__(self, num_graphs: int) -> None:
        self.num_graphs = num_graphs
        self.max_graphs = 32
        self.gradients: list[bool] = []
        self.parameters: list[torch.nn.Parameter] = []

    def give_up_half(self) -> None:
        self.gradients.append(any(parameter.grad is not None for parameter in self.parameters))
        self.max_graphs = self.num_graphs // 2
        self.num_graphs = 0


@pytest.mark.parametrize(("num_graphs", "key", "value"), [(20, "max_graphs", 10), (1, "cuda_graphs", False)])
def test_captured_passes_give_way_to_a_step_that_does_not_fit(
    train_state: Callable[..., Any],
    batches: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    num_graphs: int,
    key: str,
    value: object,
):
    state = train_state()
    [batch] = batches([[2, 1]])
    expected = train_step(copy.deepcopy(state), [batch])
    graphs = Graphs(num_graphs=num_graphs)
    graphs.parameters = list(state.detector.parameters())
    # gradients of a pass before, which lie in the memory of the graphs
    graphs.parameters[0].grad = torch.zeros_like(graphs.parameters[0])
    state = replace(state, graphs=graphs)

    def check(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if graphs.num_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    state.detector.register_forward_pre_hook(check)
    result = train_step(state, [batch])
    assert result.loss.equal(expected.loss)
    assert (graphs.num_graphs, graphs.max_graphs, graphs.gradients) == (0, num_graphs // 2, [False])
    assert f"did not fit beside {num_graphs} captured sizes" in caplog.text
    assert f"trainer.{key}={str(value).lower()} does so from the start" in caplog.text
    # the key takes it
    TrainerSettings(**{key: value})


def test_a_step_that_fits_only_uncaptured_is_made(
    train_state: Callable[..., Any], batches: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    """A new pool gives up all others before its first size is captured: none is left to give way when that fails."""
    state = train_state()
    [batch] = batches([[2, 1]])
    expected = train_step(copy.deepcopy(state), [batch])
    graphs = Graphs(num_graphs=0)
    state = replace(state, graphs=graphs)

    def check(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if graphs.max_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    state.detector.register_forward_pre_hook(check)
    assert train_step(state, [batch]).loss.equal(expected.loss)
    assert graphs.max_graphs == 0
    assert "does not fit when it is captured; from now on none is" in caplog.text
    assert "trainer.cuda_graphs=false does so from the start" in caplog.text


def test_without_captured_passes_it_does_not_fit(train_state: Callable[..., Any], batches: Callable[..., Any]):
    state = replace(train_state(), graphs=Graphs(num_graphs=3))
    limit_images(state.detector, 0)
    with pytest.raises(torch.OutOfMemoryError):
        train_step(state, batches([[2, 1]]))


def test_captured_passes_give_way_to_an_evaluation(
    trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = trainer(tmp_path)
    expected, _ = run._evaluate()
    graphs = Graphs(num_graphs=5)
    graphs.parameters = list(run.state.detector.parameters())
    graphs.parameters[0].grad = torch.zeros_like(graphs.parameters[0])
    run.state = replace(run.state, graphs=graphs)
    images = []

    def check(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        images.append(len(arguments[0]))
        # the second batch does not fit beside them
        if len(images) > 1 and graphs.num_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")

    run.state.evaluated.register_forward_pre_hook(check)
    metrics, _ = run._evaluate()
    assert metrics == expected
    # that batch twice, the first once
    assert images == [2, 2, 2]
    assert (graphs.num_graphs, graphs.max_graphs, graphs.gradients) == (0, 2, [False])
    assert "an evaluation did not fit beside 5 captured sizes" in caplog.text


@pytest.mark.parametrize("graphs", [None, Graphs(num_graphs=0)])
def test_an_evaluation_that_does_not_fit_says_what_to_lower(
    trainer: Callable[..., Any], tmp_path: Path, graphs: Graphs | None
):
    run = trainer(tmp_path)
    run.state = replace(run.state, graphs=graphs)
    limit_images(run.state.evaluated, 1)
    with pytest.raises(MemoryError, match=r"evaluation of\n  2 images padded to (.|\n)*Lower data.val_batch_size"):
        run._evaluate()


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_the_message_advises_is_not_refused(batches: Callable[..., Any], is_captured: bool):
    message = out_of_memory_message(batches([[2, 1]]), torch.device("cpu"), is_captured=is_captured)
    assert ("need trainer.cuda_graphs=false" in message) == is_captured
    for advised in ({"accumulate": 2}, {"retry_oom": True}):
        TrainerSettings(cuda_graphs=False, **advised)
        with pytest.raises(ValueError, match="cuda_graphs"):
            TrainerSettings(cuda_graphs=True, **advised)


def test_ranks_must_stay_in_step(train_state: Callable[..., Any]):
    context = DistributedContext(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"retry_oom=true needs one process, got 2 ranks"):
        train_state(retry_oom=True, context=context)
