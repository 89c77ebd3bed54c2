"""What to do when a step or an evaluation does not fit into the GPU's memory."""

import logging
from collections.abc import Sequence

import torch

from detr.engine.cuda_graphs import GraphedDetector
from detr.engine.state import TrainState
from detr.rank_logging import OF_THIS_RANK
from detr.structures import Batch, ImageBatch

_logger = logging.getLogger(__name__)


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


def give_up_graphs(state: TrainState, graphs: GraphedDetector, what: str, window: Sequence[Batch]) -> None:
    """Make room beside the captured passes of `state`, which no plain pass can share memory with.

    Args:
        state: Its gradients are dropped: they lie in that memory.
        graphs: Of `state`.
        what: Did not fit, such as "a step".
        window: Its batches.
    """
    state.optimizer.zero_grad(set_to_none=True)
    held = graphs.num_graphs
    graphs.give_up_half()
    key = f"max_graphs={graphs.max_graphs}" if graphs.max_graphs > 0 else "cuda_graphs=false"
    if held > 0:
        fault = (
            f"{what} did not fit beside {held} captured sizes, which are given up; from now on {graphs.max_graphs} are "
            "captured, as they come"
        )
    else:
        fault = f"{what} does not fit when it is captured; from now on none is"
    _logger.warning(
        "cuda_graphs: %s. trainer.%s does so from the start. Its images:\n  %s",
        *(fault, key, describe_window(window)),
        extra=OF_THIS_RANK,
    )


def evaluation_memory_message(batch: Batch) -> str:
    """What to tell the user whose evaluation did not fit."""
    return f"out of memory in the evaluation of\n  {describe_window([batch])}\nLower data.val_batch_size"


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
