"""Starting a model from the weights of another run."""

import logging
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from detr.engine.checkpoint import load_checkpoint
from detr.models import DeformableDETR
from detr.models.two_stage import ProposalQueries
from detr.structures import ClassTable

_logger = logging.getLogger(__name__)

ResetHead = Literal["auto"] | bool

# the rows of these tensors are the classes
CLASS_HEAD_PREFIX = "heads.class_embed."


def init_from(model: nn.Module, path: str | Path, class_table: ClassTable, *, reset_head: ResetHead) -> None:
    """Start `model` from the weights that the run of a checkpoint evaluated, and say what was left out.

    Args:
        class_table: Of the new run. With "auto", where its names differ from the checkpoint's, the rows of the
            class head are taken over by class name, and those of new classes start anew.
        reset_head: See `load_weights`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no checkpoint, or its weights do not fit.
    """
    checkpoint = load_checkpoint(path)
    own_head = _class_head(model.state_dict())
    initial_head = {name: tensor.clone() for name, tensor in own_head.items()}
    reset = load_weights(model, checkpoint.weights, reset_head=reset_head, source=f"init_from={path}")
    lines = [f"init_from: {len(checkpoint.weights) - len(reset)} tensors from {path}"]
    if reset:
        lines[0] += f"; {len(reset)} of the class head start anew:"
        lines += [f"  {line}" for line in reset]
    if checkpoint.class_table.names != class_table.names:
        if reset_head == "auto":
            rows = _rows_by_name(checkpoint.class_table, class_table)
            with torch.no_grad():
                for name, tensor in own_head.items():
                    tensor.copy_(initial_head[name])
                    for own_row, row in rows.items():
                        tensor[own_row] = checkpoint.weights[name][row]
                    if name.startswith(_objectness_prefixes(model)):
                        tensor[0] = checkpoint.weights[name][0]
            lines += _describe_rows(rows, class_table)
        else:
            _logger.warning(
                "init_from: the class head was trained for other classes (%s ...) than this dataset's (%s ...); "
                "its rows are taken over as they are",
                ", ".join(checkpoint.class_table.names[:5]),
                ", ".join(class_table.names[:5]),
            )
    _logger.info("%s", "\n".join(lines))


def _class_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(CLASS_HEAD_PREFIX)}


def _objectness_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The class head whose row 0 says whether there is an object, whatever class that row is named after."""
    if not isinstance(model, DeformableDETR) or not isinstance(model.queries, ProposalQueries):
        return ()
    num_heads = len(model.heads.class_embed)
    if model.queries.proposal_score != "binary" or num_heads == 1:
        return ()
    return (f"{CLASS_HEAD_PREFIX}{num_heads - 1}.",)


def _rows_by_name(old: ClassTable, new: ClassTable) -> dict[int, int]:
    """The old row of each new row whose name stands once in both tables."""
    return {
        row: old.names.index(name)
        for row, name in enumerate(new.names)
        if name and new.names.count(name) == 1 and old.names.count(name) == 1
    }


def _describe_rows(rows: dict[int, int], table: ClassTable) -> list[str]:
    kept = [table.names[row] for row in rows]
    fresh = [name for row, name in enumerate(table.names) if row not in rows]
    return [
        f"  rows of the class head by class name: {len(kept)} taken over ({_first(kept)})",
        f"  rows that start anew: {len(fresh)} ({_first(fresh)})",
    ]


def _first(names: list[str], num_shown: int = 20) -> str:
    shown = ", ".join(name or "(no name)" for name in names[:num_shown]) or "none"
    return shown + (f", and {len(names) - num_shown} more" if len(names) > num_shown else "")


def load_weights(model: nn.Module, weights: dict[str, Tensor], *, reset_head: ResetHead, source: str) -> list[str]:
    """Copy `weights` into `model`; every tensor must find its place.

    Args:
        reset_head: "auto": class-head tensors stay as initialised where the number of classes differs.
            False: they must fit like all others.
        source: Where the weights come from, for messages.

    Returns:
        One line for each tensor that was left as initialised.

    Raises:
        ValueError: Tensors are missing, left over, or of another shape; all of them are listed.
    """
    if reset_head not in ("auto", False):
        raise ValueError(f"reset_head must be auto or false; got {reset_head!r}")
    own = model.state_dict()
    reset = []
    if reset_head == "auto":
        reset = [
            name
            for name, tensor in weights.items()
            if name.startswith(CLASS_HEAD_PREFIX) and name in own and tensor.shape != own[name].shape
        ]
    problems = _differences(own, {name: tensor for name, tensor in weights.items() if name not in reset}, set(reset))
    if problems:
        shown = "\n".join(f"  {line}" for line in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        heads_only = all(line.startswith(CLASS_HEAD_PREFIX) for line in problems)
        advice = "Use reset_head=auto to start the class head anew" if heads_only else _advice(own, weights)
        raise ValueError(
            f"{source} does not fit this model ({len(problems)} of {len(own)} tensors):\n{shown}{more}\n{advice}"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            if name not in reset:
                own[name].copy_(tensor)
    return [f"{name}: {tuple(weights[name].shape)} -> {tuple(own[name].shape)}" for name in reset]


def _advice(own: dict[str, Tensor], weights: dict[str, Tensor]) -> str:
    """What to set, where one key alone explains it."""
    queries = "queries.query_embed.weight"
    differing = [name for name in {*own, *weights} if name not in own or name not in weights]
    differing += [name for name in own if name in weights and own[name].shape != weights[name].shape]
    only_queries = {name for name in differing if not name.startswith(CLASS_HEAD_PREFIX)} == {queries}
    if only_queries and queries in own and queries in weights and own[queries].shape[1] == weights[queries].shape[1]:
        return f"Set model.num_queries={weights[queries].shape[0]}, as the weights have"
    return "Use the model and backbone that the weights were trained with"


def _differences(own: dict[str, Tensor], weights: dict[str, Tensor], reset: set[str]) -> list[str]:
    lines = [f"{name}: missing in the weights" for name in own if name not in weights and name not in reset]
    for name, tensor in weights.items():
        if name not in own:
            lines.append(f"{name}: not in this model")
        elif tensor.shape != own[name].shape:
            lines.append(f"{name}: {tuple(tensor.shape)} in the weights, {tuple(own[name].shape)} in this model")
    return lines
