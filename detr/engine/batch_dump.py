"""The batches of one step in a file, to look at and to train on again."""

from collections.abc import Sequence
from pathlib import Path

import torch

from detr.engine.checkpoint_files import write_atomically
from detr.structures import Batch, ImageBatch, Target


def dump_window(window: Sequence[Batch], path: Path, *, step: int, report: str) -> None:
    """Write the batches of optimizer step `step`, with their image ids and what is known of the fault.

    Raises:
        OSError: The disk is full or the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {
        "step": step,
        "report": report,
        "batches": [
            {
                "pixels": batch.images.pixels,
                "sizes": batch.images.sizes,
                "targets": [
                    {
                        "labels": target.labels,
                        "boxes": target.boxes,
                        "image_id": target.image_id,
                        "orig_size": list(target.orig_size),
                    }
                    for target in batch.targets
                ],
            }
            for batch in window
        ],
    }
    write_atomically(path, lambda file: torch.save(payload, file))


def load_window(path: Path) -> list[Batch]:
    """The batches of `dump_window`, ready for `train_step`. Runs no code from the file.

    Older files also hold the padding masks, which follow from the sizes.
    """
    payload = torch.load(path, map_location="cpu", weights_only=True)
    return [
        Batch(
            ImageBatch(stored["pixels"], stored["sizes"]),
            tuple(
                Target(target["labels"], target["boxes"], target["image_id"], (*target["orig_size"],))
                for target in stored["targets"]
            ),
        )
        for stored in payload["batches"]
    ]
