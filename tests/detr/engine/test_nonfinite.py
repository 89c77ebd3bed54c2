"""Steps that are not finite: the fault is named, the batch kept, and nothing else changes."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from detr.engine.batch_dump import dump_window, load_window
from detr.engine.diagnosis import first_nonfinite
from detr.engine.random_state import torch_streams
from detr.engine.step import train_step
from detr.engine.step_monitor import MAX_REPORTS, StepMonitor
from detr.structures import Batch, ImageBatch, Target

CPU = torch.device("cpu")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of; other tests of the process may have turned on the logging of less."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def break_layer(state: Any, window: Any) -> None:
    state.detector.decoder.layers[1].register_forward_hook(lambda module, arguments, output: output * float("nan"))


def break_one_query(state: Any, window: Any) -> None:
    def one_nan(module: Any, arguments: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, 3] = float("inf")
        return output

    state.detector.encoder.layers[0].register_forward_hook(one_nan)


def break_weight(state: Any, window: Any) -> None:
    with torch.no_grad():
        state.detector.level_embed[0, 0] = float("nan")


def break_gradient(state: Any, window: Any) -> None:
    state.detector.level_embed.register_hook(lambda gradient: gradient * float("inf"))


def break_loss_term(state: Any, window: Any) -> None:
    inner = state.criterion._terms

    def broken(*arguments: Any) -> dict[str, Tensor]:
        terms = inner(*arguments)
        return terms | {"loss_giou": terms["loss_giou"] * float("nan")}

    state.criterion._terms = broken


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (break_layer, ["the output of decoder.layers.1", "512 of 512 values"]),
        (break_one_query, ["the output of encoder.layers.0", "32 of"]),
        (break_weight, ["the weight level_embed", "1 of 64 values"]),
        (break_loss_term, ["the loss term loss_giou"]),
        (break_gradient, ["the gradient of level_embed", "64 of 64 values"]),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(
    train_state: Callable[..., Any],
    batches: Callable[..., Any],
    break_it: Callable[[Any, Any], None],
    words: list[str],
):
    state, window = train_state(), batches([[2, 1]])
    break_it(state, window)
    found = first_nonfinite(state, window, torch_streams(CPU))
    assert found is not None
    for word in words:
        assert word in found


def test_a_healthy_step_has_nothing_to_name_and_is_left_as_it_was(
    train_state: Callable[..., Any], batches: Callable[..., Any]
):
    state, window = train_state(), batches([[2, 1], [0, 3]])
    train_step(state, window)
    before = {name: tensor.clone() for name, tensor in state.detector.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in state.detector.parameters()]
    streams = torch_streams(CPU)
    earlier = streams[0].clone()
    torch.rand(7)
    now = torch.get_rng_state()
    assert first_nonfinite(state, window, (earlier, None)) is None
    assert torch.equal(torch.get_rng_state(), now)
    for name, tensor in state.detector.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for parameter, gradient in zip(state.detector.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


@pytest.fixture
def broken_steps() -> Iterator[Callable[..., None]]:
    """Make the loss of some steps of a run NaN; the number of a step counts from 1."""

    def install(run: Any, *steps: int) -> None:
        inner, take_step = run.state.criterion._terms, run._step
        is_broken = False

        def terms(*arguments: Any) -> dict[str, Tensor]:
            found = inner(*arguments)
            return found | {"loss_bbox": found["loss_bbox"] * float("nan")} if is_broken else found

        def step(window: Any) -> Any:
            nonlocal is_broken
            # until the next step, so that looking at this one again finds the same
            is_broken = run.progress.global_step + 1 in steps
            return take_step(window)

        run.state.criterion._terms = terms
        run._step = step

    return install


def test_a_nan_loss_is_skipped_explained_and_kept(
    trainer: Callable[..., Any],
    data: Callable[..., Any],
    broken_steps: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    run = trainer(tmp_path, epochs=4, eval_every=4, data=data(num_train_images=8))
    broken_steps(run, 7)
    seen = []
    step = run._step
    run._step = lambda window: seen.append(window) or step(window)
    run.fit()
    assert run.progress.global_step == 8
    [message] = [record.message for record in caplog.records if "is not finite" in record.message]
    ids = [target.image_id for batch in seen[6] for target in batch.targets]
    for words in ("step 7", "the loss term loss_bbox", f"Images {ids}", "skipped"):
        assert words in message
    dump = tmp_path / "nonfinite" / "step_00000007_rank0.pt"
    assert str(dump) in message
    loaded = load_window(dump)
    assert [target.image_id for batch in loaded for target in batch.targets] == ids
    for stored, trained in zip(loaded, seen[6], strict=True):
        assert torch.equal(stored.images.pixels, trained.images.pixels)
        assert all(torch.equal(a.boxes, b.boxes) for a, b in zip(stored.targets, trained.targets, strict=True))


def test_a_dump_with_padding_masks_loads(tmp_path: Path):
    """Files written when the masks were part of a batch."""
    images = ImageBatch.from_images([torch.ones(3, 4, 5, dtype=torch.uint8), torch.ones(3, 6, 2, dtype=torch.uint8)])
    target = Target(torch.zeros(1, dtype=torch.int64), torch.full((1, 4), 0.5), image_id=7, orig_size=(4, 5))
    path = tmp_path / "old.pt"
    dump_window([Batch(images, (target, target))], path, step=1, report="")
    payload = torch.load(path, weights_only=True)
    payload["batches"][0]["padding_mask"] = images.padding_mask
    torch.save(payload, path)
    (batch,) = load_window(path)
    assert torch.equal(batch.images.pixels, images.pixels)
    assert torch.equal(batch.images.padding_mask, images.padding_mask)


def test_stop_ends_at_the_step(trainer: Callable[..., Any], broken_steps: Callable[..., None], tmp_path: Path):
    run = trainer(tmp_path, nonfinite="stop", save_every_steps=1)
    broken_steps(run, 3)
    with pytest.raises(FloatingPointError, match=r"step 3 is not finite.*\n.*nonfinite=skip"):
        run.fit()
    assert run.progress.global_step == 3
    assert (tmp_path / "last.pt").is_file()


def test_too_many_in_a_row_end_the_run(
    trainer: Callable[..., Any],
    data: Callable[..., Any],
    broken_steps: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    # six steps an epoch
    run = trainer(tmp_path, max_nonfinite=4, eval_every=4, data=data(num_train_images=24))
    # a finite step in between starts the count anew
    broken_steps(run, 2, 3, 4, 6, 7, 8, 9)
    with pytest.raises(FloatingPointError, match="4 steps in a row were not finite"):
        run.fit()
    assert run.progress.global_step == 9
    assert sum("is not finite on rank 0" in record.message for record in caplog.records) == MAX_REPORTS
    assert len(list((tmp_path / "nonfinite").iterdir())) == MAX_REPORTS


def test_overflow_that_the_scaler_handles_is_not_reported(
    train_state: Callable[..., Any], batches: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from dataclasses import replace

    from torch.amp.grad_scaler import GradScaler

    state = replace(train_state(), scaler=GradScaler("cpu", enabled=True))
    state.detector.level_embed.register_hook(lambda gradient: gradient * float("inf"))
    monitor = StepMonitor(state, tmp_path, rank=0, policy="stop", max_in_row=10)
    window = batches([[2, 1]])
    monitor.before_step()
    monitor.after_step(1, window, train_step(state, window))
    assert warnings_of(caplog) == []
    assert not (tmp_path / "nonfinite").exists()


def test_spikes_are_said_once(
    train_state: Callable[..., Any], batches: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from dataclasses import replace

    state, window = train_state(), batches([[2, 1]])
    monitor = StepMonitor(state, tmp_path, rank=0, policy="skip", max_in_row=10)
    result = train_step(state, window)
    result = replace(result, loss=torch.tensor(2.0), grad_norm=torch.tensor(1.0))
    with caplog.at_level(logging.WARNING):
        for number in range(1, 30):
            monitor.after_step(number, window, result)
        assert warnings_of(caplog) == []
        for number in (30, 31):
            monitor.after_step(number, window, replace(result, loss=torch.tensor(11.0), grad_norm=torch.tensor(21.0)))
    messages = warnings_of(caplog)
    assert len(messages) == 2
    assert "step 30: train/loss is 11, usually 2; images [0, 1]" in messages[0]
    assert "step 30: train/grad_norm is 21, usually 1" in messages[1]
