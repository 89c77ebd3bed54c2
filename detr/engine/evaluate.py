"""Average precision of a model on a validation set: one loop for training and for tools/evaluate."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import nn

from detr.engine.out_of_memory import evaluation_memory_message
from detr.engine.precision import Precision
from detr.evaluation import CocoEvaluator, CocoMetrics, PostProcess
from detr.structures import Batch, Detections


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    evaluator: CocoEvaluator,
    postprocess: PostProcess,
    *,
    precision: Precision,
    device: torch.device,
    make_room: Callable[[Batch], bool] | None = None,
) -> CocoMetrics:
    """Detect on this rank's share of the images and score what all ranks found.

    Ranks may have different numbers of batches, or none: the only collective comes after the loop.

    Args:
        model: The detector on `device`, without a DDP wrapper; left in the mode it came in.
        batches: Of the validation set, on the CPU.
        evaluator: Holds the ground truth; what it has collected before is forgotten.
        postprocess: Output to detections.
        precision: Of the forward pass.
        device: Where to compute.
        make_room: Called with a batch that does not fit into the device's memory; True if it is worth another try.

    Raises:
        MemoryError: A batch does not fit.
    """
    was_training = model.training
    model.eval()
    evaluator.reset()
    for batch in batches:
        detections = None
        while detections is None:
            # room is made behind this, since until then the failed attempt holds its own
            with suppress(torch.OutOfMemoryError):
                detections = detect(model, batch, postprocess, precision=precision, device=device)
            if detections is None and not (make_room is not None and make_room(batch)):
                raise MemoryError(evaluation_memory_message(batch))
        evaluator.update([target.image_id for target in batch.targets], detections)
    model.train(was_training)
    return evaluator.summarize()


@torch.no_grad()
def detect(
    model: nn.Module, batch: Batch, postprocess: PostProcess, *, precision: Precision, device: torch.device
) -> list[Detections]:
    """The detections of each image of `batch`, in pixels of the original image; `model` in evaluation mode."""
    with precision.autocast(device):
        output = model(batch.images.to(device, non_blocking=True))
    return postprocess(output, torch.tensor([target.orig_size for target in batch.targets]))
