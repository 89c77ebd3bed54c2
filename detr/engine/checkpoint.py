"""Checkpoints: tensors and plain Python only, so that `torch.load(weights_only=True)` reads them."""

import json
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from detr.engine.checkpoint_files import damage_in, write_atomically
from detr.structures import ClassTable

# 2 added epoch_samples, 3 train_s, 4 data
FORMAT_VERSION = 4


@dataclass(frozen=True)
class Checkpoint:
    """All that a run is after an optimizer step.

    Attributes:
        epoch: Epochs finished.
        global_step: Optimizer steps made.
        model: State dict of the detector.
        optimizer: State dict.
        schedule: State dict.
        scaler: State dict; empty when nothing is scaled.
        ema: State of the averaged copy, or None.
        random_states: Of each rank.
        class_table: What the labels mean.
        preprocessing: How images were made into what the model sees in evaluation, as plain JSON.
        config: The resolved configuration of the run, as plain JSON.
        metrics: Of these weights, by name; empty where they were not evaluated.
        best: Of the best evaluation so far: {"epoch", "AP"}; empty before the first.
        epoch_samples: Images of the epoch under way that all ranks together have trained on.
        train_s: Seconds of training so far, evaluations left out.
        data: From `DetectionData.fingerprints`; empty in older files.
    """

    epoch: int
    global_step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Any] | None
    random_states: list[dict[str, Any]]
    class_table: ClassTable
    preprocessing: dict[str, Any]
    config: dict[str, Any]
    metrics: dict[str, Any]
    best: dict[str, Any]
    epoch_samples: int = 0
    train_s: float = 0.0
    data: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that were evaluated: the averaged ones where the run kept an average."""
        return self.model if self.ema is None else self.ema["model"]


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write `checkpoint` to `path`, which holds the old or the new one at every moment.

    Raises:
        TypeError: `preprocessing`, `config` or metrics hold something that JSON does not.
        OSError: The disk is full or the folder is not writable; `path` is left as it was.
    """
    write_payload(checkpoint_payload(checkpoint), path)


def checkpoint_payload(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is written of `checkpoint`: its own tensors, and plain Python.

    Raises:
        TypeError: `preprocessing`, `config` or metrics hold something that JSON does not.
    """
    payload = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    payload["class_table"] = {
        "names": list(checkpoint.class_table.names),
        "category_ids": list(checkpoint.class_table.category_ids),
    }
    for name in ("preprocessing", "config", "metrics", "best"):
        payload[name] = json.loads(json.dumps(payload[name]))
    payload["format_version"] = FORMAT_VERSION
    return payload


def write_payload(payload: dict[str, Any], path: Path) -> None:
    """Write what `checkpoint_payload` made; see `save_checkpoint`."""
    # a file object: given a path, torch.save holds other threads up for a quarter of a second
    write_atomically(path, lambda file: torch.save(payload, file))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint onto the CPU. Runs no code from the file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a checkpoint of this project, is damaged, or was written by a newer version.
    """
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder, where a checkpoint file is needed{_neighbours(path / 'x')}")
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}{_neighbours(path)}")
    damage = damage_in(path)
    payload = None
    if damage is None:
        try:
            payload = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, BadZipFile, pickle.UnpicklingError, ValueError) as error:
            damage = type(error).__name__
    if damage is not None:
        raise ValueError(
            f"{path} cannot be read as a checkpoint; it is damaged, cut short or not ours ({damage}). Give a last.pt "
            "or best.pt that tools/train.py wrote"
        )
    if not isinstance(payload, dict) or "format_version" not in payload:
        found = ", ".join(sorted(map(str, payload))[:6]) if isinstance(payload, dict) else type(payload).__name__
        raise ValueError(
            f"{path} is no checkpoint of this project; it holds {found}. Give a last.pt or best.pt that "
            "tools/train.py wrote"
        )
    version = payload.pop("format_version")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has checkpoint format {version}; this version reads up to {FORMAT_VERSION}. Update deformable-detr"
        )
    try:
        table = payload.pop("class_table")
        class_table = ClassTable(tuple(table["names"]), tuple(table["category_ids"]))
        return Checkpoint(class_table=class_table, **payload)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks a part of a checkpoint, or has one too many ({error})") from error


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    found = sorted(file.name for file in path.parent.glob("*.pt"))
    return f"; that folder has {', '.join(found[:8])}" if found else "; that folder has no .pt file"
