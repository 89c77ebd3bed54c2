"""The optimizer of the recipe: AdamW over three parameter groups."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW

_logger = logging.getLogger(__name__)

# recipe section 4: these linear projections say where to look, and learn at a tenth of the rate
LINEAR_PROJ_NAMES = ("reference_points", "sampling_offsets")


@dataclass(frozen=True)
class ParameterGroup:
    """Trainable tensors that share a learning rate."""

    name: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def num_elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[ParameterGroup, ...]:
    """Split trainable parameters into exactly `main`, `backbone` and `linear_proj`, in this order.

    A tensor that has several names (shared heads) counts once, under its first. Frozen ones are left out.
    """
    groups: dict[str, list[nn.Parameter]] = {"main": [], "backbone": [], "linear_proj": []}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        groups[_group_of(name)].append(parameter)
    return tuple(ParameterGroup(name, tuple(parameters)) for name, parameters in groups.items())


def build_adamw(
    model: nn.Module,
    *,
    total_batch: int,
    lr: float = 2e-4,
    backbone_lr_factor: float = 0.1,
    linear_proj_lr_factor: float = 0.1,
    weight_decay: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    base_batch: int = 32,
    scale_lr: bool = True,
    fused: bool = True,
) -> AdamW:
    """AdamW as in recipe section 4: weight decay on every parameter, three learning rates.

    Args:
        model: Its backbone is `model.backbone`.
        total_batch: Images an optimizer step, over all GPUs and accumulated batches.
        lr: Rate of the main group at `base_batch` images a step.
        backbone_lr_factor: Rate of the backbone, relative to `lr`.
        linear_proj_lr_factor: Rate of the projections to reference points and sampling offsets, likewise.
        base_batch: The batch that `lr` is meant for.
        scale_lr: Multiply the rates with `total_batch / base_batch`.
        fused: One kernel a step, which also skips a non-finite step without asking the host.

    Raises:
        ValueError: A rate or batch is not positive, or nothing is trainable.
    """
    if lr <= 0 or base_batch < 1 or total_batch < 1:
        raise ValueError(
            "optimizer.lr, optimizer.base_batch and the total batch must be positive; "
            f"got lr={lr}, base_batch={base_batch}, total batch {total_batch}"
        )
    groups = parameter_groups(model.named_parameters())
    if not any(group.parameters for group in groups):
        raise ValueError("the model has no trainable parameter; unfreeze something")
    scaled_lr = lr * total_batch / base_batch if scale_lr else lr
    _logger.info(
        "learning rate %.3g for %d images a step (optimizer.lr=%g is for %d images; optimizer.scale_lr=%s)",
        scaled_lr,
        total_batch,
        lr,
        base_batch,
        str(scale_lr).lower(),
    )
    factors = {"main": 1.0, "backbone": backbone_lr_factor, "linear_proj": linear_proj_lr_factor}
    return AdamW(
        [
            {"name": group.name, "params": list(group.parameters), "lr": scaled_lr * factors[group.name]}
            for group in groups
        ],
        lr=scaled_lr,
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
    )


def describe_groups(optimizer: torch.optim.Optimizer) -> str:
    """One line: tensors, elements and rate of each group."""
    parts = []
    for group in optimizer.param_groups:
        num_elements = sum(parameter.numel() for parameter in group["params"])
        parts.append(f"{group['name']} {len(group['params'])} tensors {num_elements:,} lr {group['lr']:.3g}")
    return " | ".join(parts)


def _group_of(name: str) -> str:
    if name.startswith("backbone."):
        return "backbone"
    if any(part in name for part in LINEAR_PROJ_NAMES):
        return "linear_proj"
    return "main"
