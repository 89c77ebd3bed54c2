import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr.engine.step import train_step
from detr.structures import DetectorOutput


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_accumulation_equals_the_big_batch(
    detector: Callable[..., Any],
    train_state: Callable[..., Any],
    batches: Callable[..., Any],
    merged: Callable[..., Any],
    dtype: torch.dtype,
    tolerance: float,
):
    # unequal counts, an empty image and an empty batch: dividing by each batch's own count would show
    window = batches([[5, 1], [0, 0], [2, 0]])
    start = detector().to(dtype)
    results = []
    models = []
    for parts in (window, [merged(window)]):
        model = copy.deepcopy(start)
        state = train_state(model, max_grad_norm=None)
        results.append(train_step(state, parts))
        models.append(model)
    split, whole = (gradients(model) for model in models)
    assert split.keys() == whole.keys()
    for name, gradient in whole.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert ((split[name] - gradient).abs().max() / scale) < tolerance, name
    torch.testing.assert_close(results[0].loss, results[1].loss, rtol=tolerance, atol=tolerance)
    for name, term in results[1].terms.items():
        torch.testing.assert_close(results[0].terms[name], term, rtol=tolerance, atol=tolerance)
    assert results[0].num_images == 6


def test_every_trainable_parameter_moves_and_no_frozen_one(
    train_state: Callable[..., Any], batches: Callable[..., Any]
):
    # a large rate and no clipping: zero-initialised layers only move once those before them do
    state = train_state(lr=1e-2, max_grad_norm=None)
    before = copy.deepcopy(state.detector.state_dict())
    for _ in range(3):
        train_step(state, batches([[3, 2]]))
    for name, parameter in state.detector.named_parameters():
        assert torch.equal(before[name], parameter) != parameter.requires_grad, name


def test_gradients_are_clipped_and_the_norm_before_is_reported(
    train_state: Callable[..., Any], batches: Callable[..., Any]
):
    state = train_state(max_grad_norm=0.1)
    state.criterion.weights = {name: 1e3 * weight for name, weight in state.criterion.weights.items()}
    result = train_step(state, batches([[3, 2]]))
    norm = torch.stack([g.norm() for g in gradients(state.detector).values()]).norm()
    assert result.grad_norm > 100
    assert norm == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(
    train_state: Callable[..., Any], batches: Callable[..., Any], fused: bool
):
    state = train_state(fused=fused, ema_decay=0.9)
    window = batches([[2, 1]])
    train_step(state, window)
    weights = copy.deepcopy(state.detector.state_dict())
    moments = copy.deepcopy(state.optimizer.state_dict()["state"])

    parameter = state.detector.level_embed
    handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
    result = train_step(state, window)
    handle.remove()
    assert result.skipped == 1
    assert not result.grad_norm.isfinite()
    for name, tensor in state.detector.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    after = state.optimizer.state_dict()["state"]
    for index, slots in moments.items():
        for slot, value in slots.items():
            assert torch.equal(after[index][slot], value), (index, slot)

    assert train_step(state, window).skipped == 0
    assert not torch.equal(state.detector.level_embed, weights["level_embed"])
    assert state.detector.level_embed.isfinite().all()


def test_a_loss_that_is_not_finite_is_skipped_even_if_its_gradients_are(
    train_state: Callable[..., Any], batches: Callable[..., Any]
):
    state = train_state()
    inner = state.criterion.forward

    def broken(output: DetectorOutput, targets: Any, num_boxes: Any) -> Any:
        loss = inner(output, targets, num_boxes)
        # an infinity without a gradient, as a guard in the graph would leave it
        return type(loss)(loss.total + torch.tensor(float("inf")), loss.terms, loss.class_error)

    state.criterion.forward = broken
    before = copy.deepcopy(state.detector.state_dict())
    assert train_step(state, batches([[2, 1]])).skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.detector.state_dict().items())


def test_schedule_and_average_move_with_each_step(train_state: Callable[..., Any], batches: Callable[..., Any]):
    state = train_state(ema_decay=0.9, steps=1)
    rates = [train_step(state, batches([[1, 1]])).lr for _ in range(3)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4])
    assert state.ema.num_updates == 3
    assert not torch.equal(state.ema.module.level_embed, state.detector.level_embed)


def test_images_without_boxes_train(train_state: Callable[..., Any], batches: Callable[..., Any]):
    result = train_step(train_state(), batches([[0, 0]]))
    assert result.loss.isfinite()
    assert result.terms["loss_bbox"] == 0
    assert result.terms["loss_ce"] > 0


def test_an_empty_window_is_an_error(train_state: Callable[..., Any]):
    with pytest.raises(ValueError, match="at least one batch"):
        train_step(train_state(), [])


def test_bf16_trains_close_to_fp32(
    detector: Callable[..., Any], train_state: Callable[..., Any], batches: Callable[..., Any]
):
    from dataclasses import replace

    from detr.engine.precision import Precision

    window = batches([[3, 2]])
    full = train_step(train_state(), window)
    state = replace(train_state(), precision=Precision("bf16"))
    half = train_step(state, window)
    # the loss itself is computed in float32 from the bf16 outputs
    assert half.loss.dtype == torch.float32
    torch.testing.assert_close(half.loss, full.loss, rtol=3e-2, atol=0)
