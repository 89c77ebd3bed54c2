"""A model card: what a checkpoint is, for someone who finds it."""

from pathlib import Path
from typing import Any

from detr.engine.checkpoint import Checkpoint
from detr.evaluation import format_ap

MODEL_CARD = "MODEL_CARD.md"

_NUM_NAMES = 100
# of batch norms: saved with the weights, and not trained
_BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def write_model_card(checkpoint: Checkpoint, path: Path, *, data_license: str = "unknown") -> None:
    """Write a model card in Markdown.

    Args:
        checkpoint: What it is about.
        path: The .md file.
        data_license: Of the training data, which no annotation file is trusted to say.
    """
    path.write_text(model_card(checkpoint, data_license=data_license), encoding="utf-8")


def model_card(checkpoint: Checkpoint, *, data_license: str = "unknown") -> str:
    """The text of a model card; see `write_model_card`."""
    model: dict[str, Any] = checkpoint.config.get("model", {})
    data: dict[str, Any] = checkpoint.config.get("data", {})
    backbone = model.get("backbone", {})
    variant = "two-stage" if model.get("two_stage") else "refinement" if model.get("with_box_refine") else "plain"
    table = checkpoint.class_table
    names = [f"{name} ({id})" for name, id in zip(table.names, table.category_ids, strict=True) if name]
    shown = ", ".join(names[:_NUM_NAMES]) + (f", and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else "")
    numbers = {name: value for name, value in checkpoint.metrics.items() if isinstance(value, int | float)}
    rows = "\n".join(f"| {name} | {format_ap(value)} |" for name, value in numbers.items())
    num_parameters = sum(
        tensor.numel() for name, tensor in checkpoint.weights.items() if not name.endswith(_BATCH_STATISTICS)
    )
    return f"""# {checkpoint.config.get("name", "Deformable DETR")}

Object detector: Deformable DETR ({variant}), backbone {backbone.get("name", "unknown")}, {num_parameters / 1e6:.1f}
million parameters; {checkpoint.epoch} epochs, {checkpoint.global_step} optimizer steps.

## Training data

- Source: {data.get("_target_", "unknown")}, root {data.get("root") or "-"}
- Licence: {data_license}
- Classes, with the category ids of the data: {shown}

## Results

On the validation split that the run was configured with:

| metric | value |
|---|---|
{rows or "| not yet evaluated | - |"}

## Use

```
python tools/predict.py checkpoint=best.pt source=photos/
```

Images are resized as {checkpoint.preprocessing.get("resize", "unknown")}; normalisation is part of the model. The
resolved configuration is in the checkpoint and in config.yaml beside it.
"""
