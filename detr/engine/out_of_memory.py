"""What to do when a step does not fit into the GPU's memory."""

from collections.abc import Sequence

import torch

from detr.structures import Batch, ImageBatch


def halves(window: Sequence[Batch]) -> list[Batch]:
    """The batches of `window`, each with more than one image cut in two, padded as before."""
    parts = []
    for batch in window:
        middle = len(batch) // 2
        parts += [batch] if middle == 0 else [_part(batch, slice(middle)), _part(batch, slice(middle, None))]
    return parts


def can_be_halved(window: Sequence[Batch]) -> bool:
    return any(len(batch) > 1 for batch in window)


def describe_window(window: Sequence[Batch]) -> str:
    """Sizes and box counts of the batches, which decide how much memory a step takes."""
    lines = []
    for batch in window:
        N, _, H, W = batch.images.pixels.shape
        sizes = ", ".join(f"{h}x{w}" for h, w in batch.images.sizes.tolist())
        counts = ", ".join(str(len(target.labels)) for target in batch.targets)
        ids = ", ".join(str(target.image_id) for target in batch.targets)
        lines.append(f"{N} images padded to {H}x{W} px (h x w: {sizes}), boxes {counts}, image ids {ids}")
    return "\n  ".join(lines)


def out_of_memory_message(window: Sequence[Batch], device: torch.device, *, is_captured: bool) -> str:
    """What to tell the user whose step did not fit; captured passes take neither accumulation nor halves."""
    limits = ""
    if device.type == "cuda":
        peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
        limits = f" ({peak_gib:.1f} GiB at most in use, of {torch.cuda.mem_get_info(device)[1] / 2**30:.1f} GiB)"
    return (
        f"out of memory{limits} in a step of\n  {describe_window(window)}\nLower data.batch_size (and raise "
        "trainer.accumulate), the image size in transforms, or use precision=bf16; trainer.retry_oom=true trains such "
        "a step in halves, with the same gradients but for dropout and batch norms that are not frozen"
        + ("; trainer.accumulate and trainer.retry_oom need trainer.cuda_graphs=false" if is_captured else "")
    )


def _part(batch: Batch, rows: slice) -> Batch:
    images = batch.images
    return Batch(ImageBatch(images.pixels[rows], images.sizes[rows]), batch.targets[rows])
