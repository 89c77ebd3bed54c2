"""A detector as a checkpoint describes it."""

from collections.abc import Iterator
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from torch import nn

import detr.data
import detr.models
from detr.engine.checkpoint import Checkpoint
from detr.inference.saved_model import build_saved_detector

# what the configuration in a checkpoint may build: a file from elsewhere must not choose what runs here
BUILDABLE = frozenset(
    {f"detr.models.{name}" for name in detr.models.__all__}
    | {f"detr.data.{name}" for name in detr.data.__all__}
    | {"ops.KernelConfig"}
)


def build_detector(checkpoint: Checkpoint, *, kernel: DictConfig, source: str, device: torch.device) -> nn.Module:
    """The detector of a checkpoint with the weights that its run evaluated, in evaluation mode.

    Args:
        kernel: The MSDA kernel to use here, as in configs/kernel.
        source: Where the checkpoint comes from, for messages.

    Raises:
        ValueError: Its configuration builds something that is no part of the model, or its weights do not fit.
    """
    require_buildable(checkpoint.config["model"], source)
    return build_saved_detector(checkpoint, kernel=instantiate(kernel), source=source, device=device)


def data_config(cfg: DictConfig, checkpoint: Checkpoint) -> DictConfig:
    """The data to evaluate a checkpoint on: its own, with the data.* keys of the command line in their place.

    A dataset chosen with data=NAME keeps the resizing and padding of the checkpoint.

    Raises:
        ValueError: A key that the checkpoint's kind of data does not have.
    """
    stored = OmegaConf.create(checkpoint.config["data"])
    require_buildable(checkpoint.config["data"], cfg.checkpoint)
    keys = [override.split("=")[0].lstrip("+~") for override in HydraConfig.get().overrides.task]
    for key in keys:
        if key.split(".")[0] == "transforms":
            raise ValueError(
                f"{key}: a checkpoint is evaluated with its own resizing. Another size is data.eval_transforms.size=N, "
                "with data.eval_transforms.max_size=N"
            )
    keys = [key for key in keys if key == "data" or key.startswith("data.")]
    if "data" in keys:
        chosen = cfg.data.copy()
        OmegaConf.set_struct(chosen, False)
        for name in ("eval_transforms", "pad_to"):
            if f"data.{name}" not in keys:
                chosen[name] = stored[name]
        return chosen
    OmegaConf.set_struct(stored, True)
    for key in keys:
        name = key.removeprefix("data.")
        try:
            OmegaConf.update(stored, name, OmegaConf.select(cfg, key))
        except (ConfigAttributeError, ConfigKeyError) as error:
            names = ", ".join(f"data.{each}" for each in stored if not str(each).startswith("_"))
            raise ValueError(
                f"{key}: the data that {cfg.checkpoint} was trained on ({stored['_target_']}) has no such key; "
                f"it has {names}. Choose another kind with data=NAME as well"
            ) from error
    return stored


def require_buildable(config: Any, source: str) -> None:
    """Refuse a configuration from a checkpoint that would run anything but constructors of this project.

    Raises:
        ValueError: A `_target_` is not in `BUILDABLE`.
    """
    for target in _targets(config):
        if target not in BUILDABLE:
            raise ValueError(
                f"{source}: its configuration would run {target}, which is no model or dataset of this project, so "
                "it is not loaded. Checkpoints of own classes need them in detr.models or detr.data"
            )


def _targets(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if "_target_" in config:
            yield str(config["_target_"])
        for value in config.values():
            yield from _targets(value)
    elif isinstance(config, list):
        for value in config:
            yield from _targets(value)
