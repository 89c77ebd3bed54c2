"""An exponential moving average of a model's weights."""

import copy
from typing import Any

import torch
from torch import nn


class EMA:
    """A second copy of the model that follows the first slowly; evaluate `ema.module`.

    Parameters are averaged; buffers (batch statistics, counters) are copied, since an average of running
    averages lags twice. The decay rises as (1 + t) / (10 + t) with the updates t, up to `decay`, so that
    the random start is forgotten fast.

    Args:
        model: Without a DDP wrapper.
        decay: In (0, 1).

    Raises:
        ValueError: `decay` is out of range.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"trainer.ema_decay must be in (0, 1), or null for none; got {decay}")
        self.decay = decay
        self.num_updates = 0
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards `model`, without host-device synchronisation."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), 1 - decay)
        buffers = list(model.buffers())
        if buffers:
            torch._foreach_copy_(list(self.module.buffers()), buffers)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "model": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self.module.load_state_dict(state["model"])
