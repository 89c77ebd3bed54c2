"""Checkpoints from the weights of other codebases, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from detr.checkpoints.classes import coco_class_table, named_rows, select_rows
from detr.checkpoints.convert import Codebase, export_state, import_state
from detr.checkpoints.files import write_tensors
from detr.checkpoints.huggingface import huggingface_config
from detr.engine.checkpoint import Checkpoint
from detr.engine.run_folder import write_json
from detr.evaluation import read_annotations
from detr.structures import ClassTable

Rows = Literal["named", "all"]


@dataclass(frozen=True)
class ImportedCheckpoint:
    """A checkpoint of another codebase's weights, and what was done to them."""

    checkpoint: Checkpoint
    notes: tuple[str, ...]


def import_checkpoint(
    tensors: Mapping[str, Tensor],
    codebase: Codebase,
    model: Mapping[str, Tensor],
    *,
    class_table: ClassTable | None,
    rows: Rows,
    config: dict[str, Any],
    preprocessing: dict[str, Any],
    source: str,
) -> ImportedCheckpoint:
    """A checkpoint that evaluation, prediction and `init_from` take.

    Args:
        tensors: Of the file.
        codebase: Whose names they have.
        model: State dict of a model of the file's number of classes, on any device.
        class_table: What the file's class rows stand for; None for COCO's 80 or 91.
        rows: "named" leaves out class rows that stand for no category, as the eleven gaps of COCO's 91.
        config: Of the checkpoint, with `model` as it was built.
        preprocessing: Of the checkpoint.
        source: Where the weights come from, for messages.

    Raises:
        ValueError: The weights do not fit, the class table has another number of rows, or `rows` is neither.
    """
    if rows not in ("named", "all"):
        raise ValueError(f"rows must be named or all; got {rows!r}")
    refine = bool(config["model"]["with_box_refine"])
    imported = import_state(tensors, codebase, model, with_box_refine=refine, source=source)
    state, notes = imported.state, list(imported.notes)
    num_classes = len(state["heads.class_embed.0.bias"])
    table = coco_class_table(num_classes) if class_table is None else class_table
    if table.num_classes != num_classes:
        raise ValueError(
            f"{source} has {num_classes} classes, and classes= names {table.num_classes}; give the annotation file "
            "that it was trained on"
        )
    kept = named_rows(table)
    if rows == "named" and len(kept) < table.num_classes:
        binary = config["model"]["proposal_score"] == "binary"
        state = select_rows(state, kept, with_box_refine=refine, binary_proposals=binary)
        table = ClassTable(tuple(table.names[row] for row in kept), tuple(table.category_ids[row] for row in kept))
        notes.append(f"class heads: {num_classes} rows became {table.num_classes}, by class name")
    checkpoint = Checkpoint(
        epoch=0,
        global_step=0,
        model=state,
        optimizer={},
        schedule={},
        scaler={},
        ema=None,
        random_states=[],
        class_table=table,
        preprocessing=preprocessing,
        config=config,
        metrics={},
        best={},
    )
    return ImportedCheckpoint(checkpoint, tuple(notes))


def export_checkpoint(checkpoint: Checkpoint, codebase: Codebase, folder: Path) -> list[Path]:
    """Write a checkpoint's weights for another codebase; returns the files.

    They are those that its run evaluated. Hugging Face gets a folder that `from_pretrained` opens, the others a
    .pth file of {"model": tensors} ({"state_dict": tensors} for MMDetection's tools).

    Raises:
        ValueError: The codebase has no name for a tensor.
    """
    model_config = checkpoint.config["model"]
    refine = bool(model_config["with_box_refine"])
    theirs = export_state(checkpoint.weights, codebase, with_box_refine=refine)
    if codebase == "hf":
        weights, config = folder / "hf" / "model.safetensors", folder / "hf" / "config.json"
        write_tensors(theirs, weights)
        table = checkpoint.class_table
        write_json(config, huggingface_config(model_config, table.names))
        return [weights, config]
    path = folder / f"{codebase}.pth"
    write_tensors(theirs, path, wrapper="state_dict" if codebase == "mmdet" else "model")
    return [path]


def class_table_of(path: Path) -> ClassTable:
    """The categories of a COCO annotation file in the order of their ids.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no annotation file, or has no categories.
    """
    categories = read_annotations(path).get("categories")
    if not isinstance(categories, list) or not categories:
        raise ValueError(f"{path} lists no categories; give a COCO annotation file of the data set")
    try:
        names = {int(category["id"]): str(category["name"]) for category in categories}
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: each category needs an integer id and a name ({error!r})") from error
    return ClassTable(tuple(names[id] for id in sorted(names)), tuple(sorted(names)))
