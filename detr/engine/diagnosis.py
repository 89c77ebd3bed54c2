"""Where a step stopped being finite: the step again, looked at operator by operator. Slow; only for broken steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from detr.engine.as_if_not_run import as_if_not_run
from detr.engine.random_state import TorchStreams, restore_torch_streams
from detr.engine.state import TrainState
from detr.structures import Batch, DetectorOutput, LayerOutput


def first_nonfinite(state: TrainState, window: Sequence[Batch], random_streams: TorchStreams) -> str | None:
    """Name the first tensor that is not finite when `window` is trained on again; None if all are finite.

    Looks at the weights, then at what each module returns, in the order they run, then at the terms of the loss,
    then at the gradients, from the loss backwards. Leaves weights, buffers, gradients and random streams as they
    are; no collective.

    Args:
        state: Of the run. On a GPU the weights may be those of one step later.
        window: The batches of the step.
        random_streams: Of this process before the step, so that dropout drops the same.
    """
    for name, parameter in state.detector.named_parameters():
        if not _is_finite(parameter):
            return f"the weight {name} ({_describe(parameter)})"
    # hooks do not run in compiled regions
    with as_if_not_run(state.detector, state.device), torch.compiler.set_stance("force_eager"):
        restore_torch_streams(random_streams, state.device)
        found = (_first_in_batch(state, batch) for batch in window)
        return next((name for name in found if name is not None), None)


def _first_in_batch(state: TrainState, batch: Batch) -> str | None:
    found: list[str] = []

    def look(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if not found:
            found.extend(
                f"the output of {name} ({type(module).__name__}: {_describe(tensor)})"
                for tensor in _tensors(output)
                if not _is_finite(tensor)
            )

    handles = [
        module.register_forward_hook(lambda module, arguments, output, name=name: look(name, module, arguments, output))
        for name, module in state.detector.named_modules()
        if name
    ]
    try:
        with state.precision.autocast(state.device):
            output = state.detector(batch.images.to(state.device))
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    # its scale changes no finiteness
    loss = state.criterion(output, batch.targets, 1.0)
    for name, term in loss.terms.items():
        if not _is_finite(term):
            return f"the loss term {name} ({term.item()})"
    if not _is_finite(loss.total):
        return f"the total loss ({loss.total.item()}), though every term is finite"
    named = [(name, parameter) for name, parameter in state.detector.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(
        state.scaler.scale(loss.total), [parameter for _, parameter in named], allow_unused=True
    )
    # modules are registered in the order they run
    for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and not _is_finite(gradient):
            return f"the gradient of {name} ({_describe(gradient)})"
    return None


def _tensors(output: Any) -> list[Tensor]:
    """The floating tensors of what a module returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, DetectorOutput):
        return _tensors([output.layer_logits, output.layer_boxes, output.enc_outputs])
    if isinstance(output, LayerOutput):
        return _tensors([output.pred_logits, output.pred_boxes])
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _describe(tensor: Tensor) -> str:
    num_bad = int((~tensor.isfinite()).sum())
    return f"{num_bad} of {tensor.numel()} values of shape {tuple(tensor.shape)}"
