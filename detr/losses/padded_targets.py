"""The targets of a batch as rectangles, so that no tensor's shape depends on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from detr.dtypes import at_least_float32
from detr.structures import Target

# a box with an area, so that the costs of padded rows are finite
PADDING_BOX = 0.5


@dataclass(frozen=True)
class PaddedTargets:
    """Targets of N images, T the most boxes of any of them.

    Attributes:
        labels: (N, T) int64, 0 in padded rows.
        boxes: (N, T, 4) float32 at least, (cx, cy, w, h) in [0, 1]; PADDING_BOX four times in padded rows.
        counts: Boxes of each image, on the host.
        image_ids: For messages.
        host_labels: `labels` as they were before they travelled, if they came from the CPU; else None.
        host_boxes: Likewise.
    """

    labels: Tensor
    boxes: Tensor
    counts: tuple[int, ...]
    image_ids: tuple[int, ...]
    host_labels: Tensor | None = None
    host_boxes: Tensor | None = None

    @classmethod
    def from_targets(cls, targets: Sequence[Target], device: torch.device) -> "PaddedTargets":
        """Pad `targets` and bring them to `device`.

        Targets on the CPU, as the loader makes them, are padded there and travel in two copies; nothing waits
        for the device, whose values are never read.
        """
        labels = pad_sequence([target.labels for target in targets], batch_first=True)
        boxes = pad_sequence(
            [at_least_float32(target.boxes) for target in targets], batch_first=True, padding_value=PADDING_BOX
        )
        counts = tuple(target.labels.shape[0] for target in targets)
        return cls(
            _to(labels, device),
            _to(boxes, device),
            counts,
            tuple(target.image_id for target in targets),
            host_labels=labels if labels.device.type == "cpu" else None,
            host_boxes=boxes if boxes.device.type == "cpu" else None,
        )

    def as_objects(self) -> "PaddedTargets":
        """The same boxes, all of class 0: what proposals are trained on."""
        host_labels = None if self.host_labels is None else torch.zeros_like(self.host_labels)
        return replace(self, labels=torch.zeros_like(self.labels), host_labels=host_labels)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
