"""The targets of a batch as rectangles, so that no tensor's shape depends on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from detr.dtypes import at_least_float32
from detr.structures import Target


@dataclass(frozen=True)
class PaddedTargets:
    """Targets of N images, T the most boxes of any of them.

    Attributes:
        labels: (N, T) int64, 0 in padded rows.
        boxes: (N, T, 4) float32 at least, (cx, cy, w, h) in [0, 1]; a box of the whole image in padded rows.
        counts: Boxes of each image, on the host.
        image_ids: For messages.
    """

    labels: Tensor
    boxes: Tensor
    counts: tuple[int, ...]
    image_ids: tuple[int, ...]

    @classmethod
    def from_targets(cls, targets: Sequence[Target]) -> "PaddedTargets":
        """Pad `targets`; no value is read, so nothing waits for the device."""
        labels = pad_sequence([target.labels for target in targets], batch_first=True)
        boxes = pad_sequence([at_least_float32(target.boxes) for target in targets], batch_first=True)
        counts = tuple(target.labels.shape[0] for target in targets)
        rows = torch.arange(labels.shape[1], device=labels.device)
        padded = torch.stack([rows >= count for count in counts]) if targets else rows[None] < 0
        whole = torch.stack((boxes.new_full((), 0.5),) * 2 + (boxes.new_ones(()),) * 2)
        boxes = torch.where(padded[..., None], whole, boxes)
        return cls(labels, boxes, counts, tuple(target.image_id for target in targets))

    def as_objects(self) -> "PaddedTargets":
        """The same boxes, all of class 0: what proposals are trained on."""
        return replace(self, labels=torch.zeros_like(self.labels))
