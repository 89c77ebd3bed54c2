"""One optimizer step: the only place where weights change, shared by the trainer and the benchmark."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from detr.distributed import all_reduce_sum, average_tensors, world_size
from detr.engine.out_of_memory import can_be_halved, describe_window, give_up_graphs, halves
from detr.engine.state import TrainState
from detr.losses import LossOutput
from detr.rank_logging import OF_THIS_RANK
from detr.structures import Batch
from detr.telemetry.host_copy import HostCopy
from detr.telemetry.timer import PhaseTimer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step did. Tensors are scalars on the device, of this rank; reading one waits for the step.

    Attributes:
        loss: Weighted total of the window. The mean over ranks is the loss of the whole window.
        terms: Unweighted terms of the window; likewise.
        class_error: Percent of matched queries with the wrong class, mean over the window's batches.
        grad_norm: Global L2 norm before clipping, the same on every rank.
        skipped: 1.0 if the gradients were not finite, so that weights and optimizer stayed as they were.
        lr: Rate of the main parameter group in this step.
        num_images: Images of this rank.
        num_stop_requests: Ranks that passed `stop_requested`, the same on every rank; reading it does not wait for
            the step.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    class_error: Tensor
    grad_norm: Tensor
    skipped: Tensor
    lr: float
    num_images: int
    num_stop_requests: HostCopy


def train_step(
    state: TrainState, window: Sequence[Batch], timer: PhaseTimer | None = None, *, stop_requested: bool = False
) -> StepResult:
    """Forward and backward over the batches of `window`, then one update of the weights.

    Every loss is divided by the box count of the whole window over all ranks, so a window of batches, or
    several ranks, give the gradient of one big batch.

    A step whose loss or gradients are not finite changes nothing but batch statistics and the schedule. The
    decision stays on the device with a fused optimizer; with another one the host reads one flag a step.

    Args:
        window: One batch, or the micro batches to accumulate, on the CPU; the same number on every rank.
        timer: Gets the spans h2d, forward, loss, backward, all_reduce (with `state.averages_gradients`; DDP sums
            within backward) and optimizer; None times nothing.
        stop_requested: What this rank tells the others, who may have to stop together.

    Raises:
        ValueError: `window` is empty, or holds several batches for captured graphs, whose gradients would
            overwrite each other; or `state.averages_gradients` and a parameter got none.
        torch.OutOfMemoryError: The step does not fit, nor uncaptured once captured passes have given up their memory,
            nor in halves where `state.retry_oom` allows them; weights and optimizer are as before unless it came from
            the optimizer itself.
    """
    if not window:
        raise ValueError("train_step needs at least one batch; got an empty window")
    timer = timer or PhaseTimer(state.device, enabled=False)
    num_boxes, num_stop_requests = _sums_over_ranks(window, stop_requested, state.device)
    losses = _accumulate_or_halve(state, window, num_boxes, timer)
    if state.averages_gradients:
        with timer.span("all_reduce"):
            average_tensors(_gradients(state))

    lr = state.optimizer.param_groups[0]["lr"]
    with timer.span("optimizer"):
        grad_norm, skipped = _update_weights(state)
        state.schedule.step()
        if state.ema is not None:
            state.ema.update(state.detector)
    return StepResult(
        loss=torch.stack([loss.total for loss in losses]).sum(),
        terms={name: torch.stack([loss.terms[name] for loss in losses]).sum() for name in losses[0].terms},
        class_error=torch.stack([loss.class_error for loss in losses]).mean(),
        grad_norm=grad_norm,
        skipped=skipped,
        lr=lr,
        num_images=sum(len(batch) for batch in window),
        num_stop_requests=num_stop_requests,
    )


def _sums_over_ranks(window: Sequence[Batch], stop_requested: bool, device: torch.device) -> tuple[Tensor, HostCopy]:
    """Boxes of the window over all ranks, divided by their number, at least 1: () float32; and the stop requests.

    Both in one collective. The copy to the host starts before the step's own work, so it is there at its end.
    """
    num_boxes = sum(len(target.labels) for batch in window for target in batch.targets)
    # filled on the device: a tensor made from host numbers by copying would stall the GPU
    sums = torch.full((2,), float(num_boxes), device=device)
    sums[1:].fill_(float(stop_requested))
    sums = all_reduce_sum(sums)
    return (sums[0] / world_size()).clamp(min=1), HostCopy(sums[1])


def _accumulate_or_halve(
    state: TrainState, window: Sequence[Batch], num_boxes: Tensor, timer: PhaseTimer
) -> list[LossOutput]:
    """The gradients of the window; where they do not fit into memory, with fewer captured passes, or, if the run says
    so, in smaller batches."""
    while True:
        state.optimizer.zero_grad(set_to_none=True)
        try:
            return _accumulate(state, window, num_boxes, timer)
        except torch.OutOfMemoryError:
            # also where none is held: a new pool gives up the others before its first size is captured
            captures = state.graphs is not None and state.graphs.max_graphs > 0
            if not (captures or (state.retry_oom and can_be_halved(window))):
                raise
        # only here, behind the except clause, is what the failed attempt held free
        if state.graphs is not None:
            give_up_graphs(state, state.graphs, "a step", window)
            continue
        window = halves(window)
        _logger.warning(
            "a step did not fit into memory and is tried in halves:\n  %s", describe_window(window), extra=OF_THIS_RANK
        )
        if state.device.type == "cuda":
            torch.cuda.empty_cache()


def _accumulate(state: TrainState, window: Sequence[Batch], num_boxes: Tensor, timer: PhaseTimer) -> list[LossOutput]:
    if state.graphs is not None and len(window) > 1:
        raise ValueError(
            f"CUDA graphs take one batch an optimizer step; got {len(window)}. Set trainer.accumulate=1 or "
            "trainer.cuda_graphs=false"
        )
    losses = []
    for index, batch in enumerate(window):
        with _gradient_sync(state.model, is_last=index == len(window) - 1):
            losses.append(_forward_backward(state, batch, num_boxes, timer))
    return losses


def _gradient_sync(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """DDP adds up the gradients of the ranks once a window, in its last backward pass."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def _forward_backward(state: TrainState, batch: Batch, num_boxes: Tensor, timer: PhaseTimer) -> LossOutput:
    """Adds the gradients of one batch; returns its loss without the graph."""
    with timer.span("h2d"):
        # a loader's buffers are page-locked and stay where they are; from other memory a copy would make the host wait
        images = batch.images.pin_memory() if state.device.type == "cuda" else batch.images
        images = images.to(state.device, non_blocking=True)
    with timer.span("forward"), state.precision.autocast(state.device):
        output = state.model(images)
    with timer.span("loss"):
        # the criterion moves the targets, padded to one tensor
        loss = state.criterion(output, batch.targets, num_boxes)
    total = loss.total.detach()
    # 1, or NaN if the loss is not finite: no guard in the graph may turn a broken loss into plausible
    # gradients, and through the gradients every rank learns of it
    with timer.span("backward"):
        state.scaler.scale(loss.total).backward(1 + 0 * total)
    return LossOutput(total, {name: term.detach() for name, term in loss.terms.items()}, loss.class_error)


def _update_weights(state: TrainState) -> tuple[Tensor, Tensor]:
    """Clip and step. Returns the norm before clipping and 1.0 where the step was skipped."""
    state.scaler.unscale_(state.optimizer)
    limit = float("inf") if state.max_grad_norm is None else state.max_grad_norm
    grad_norm = nn.utils.clip_grad_norm_(_parameters(state), limit, foreach=True)
    skipped = 1 - grad_norm.isfinite().float()
    if state.scaler.is_enabled():
        state.scaler.step(state.optimizer)
        state.scaler.update()
    elif state.optimizer.defaults.get("fused"):
        _fused_step(state.optimizer, skipped)
    elif not skipped.item():
        state.optimizer.step()
    return grad_norm, skipped


def _parameters(state: TrainState) -> list[Tensor]:
    return [parameter for group in state.optimizer.param_groups for parameter in group["params"]]


def _gradients(state: TrainState) -> list[Tensor]:
    """Of every parameter: were one left out on one rank, the next one's would be added to it there.

    Raises:
        ValueError: A parameter has none.
    """
    parameters = _parameters(state)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) < len(parameters):
        names = [name for name, p in state.detector.named_parameters() if p.requires_grad and p.grad is None]
        raise ValueError(
            f"{len(names)} parameters have no part in the loss of this step ({', '.join(names[:5])}), and several "
            "ranks average all gradients; freeze them (requires_grad=False) or train on one process"
        )
    return gradients


def _fused_step(optimizer: Optimizer, skipped: Tensor) -> None:
    """Step unless `skipped`, which only the device reads: the protocol that GradScaler uses."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
