"""The values that cross files: a batch of images, its targets, and what the detector says.

Shapes: N images, (H, W) the padded size of a batch in pixels, T boxes of one image, Lq queries,
C classes, K decoder layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling


@dataclass(frozen=True)
class ImageBatch:
    """Images padded at the bottom and the right to one size.

    Attributes:
        pixels: (N, 3, H, W) uint8 RGB in [0, 255], of any memory layout; the backbone normalises them on its device.
        sizes: (N, 2) int64, (h, w) of each image without its padding, in pixels; on the device of `pixels`.

    Raises:
        ValueError: A shape or dtype does not fit, or on the CPU a size; reading a device tensor would stall the GPU.
    """

    pixels: Tensor
    sizes: Tensor

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4 or self.pixels.shape[1] != 3 or self.pixels.dtype != torch.uint8:
            raise ValueError(
                f"ImageBatch.pixels must be (N, 3, H, W) uint8 RGB; got {self.pixels.dtype} of shape "
                f"{tuple(self.pixels.shape)}. Do not normalise: the backbone does"
            )
        N, _, H, W = self.pixels.shape
        if self.sizes.shape != (N, 2) or self.sizes.dtype != torch.int64:
            raise ValueError(
                f"ImageBatch.sizes must be int64 (h, w) of shape {(N, 2)}; got {self.sizes.dtype} of shape "
                f"{tuple(self.sizes.shape)}"
            )
        # what is compiled or exported has shapes and no values
        if self.sizes.device.type == "cpu" and not is_compiling():
            for index, (h, w) in enumerate(self.sizes.tolist()):
                if not (0 < h <= H and 0 < w <= W):
                    raise ValueError(
                        f"ImageBatch.sizes[{index}] is {(h, w)}, which must be at least one pixel and fit into the "
                        f"padded {(H, W)}. Build the batch with ImageBatch.from_images"
                    )

    @classmethod
    def from_images(
        cls, images: Sequence[Tensor], *, pad_to: int = 1, allocate: Callable[[int], Tensor] | None = None
    ) -> Self:
        """Pad images to one size.

        Args:
            images: N tensors (3, h, w) uint8 RGB, on the CPU.
            pad_to: Round the padded height and width up to a multiple of this many pixels. 1 pads to the
                largest image.
            allocate: Gives memory for so many bytes or more: one-dimensional uint8 on the CPU, of any content. None
                takes it from PyTorch. Called when `images` have proved sound.
        """
        if not images:
            raise ValueError("ImageBatch.from_images needs at least one image; got none")
        for index, image in enumerate(images):
            if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8:
                raise ValueError(
                    f"images[{index}] must be (3, h, w) uint8 RGB; got {image.dtype} of shape {tuple(image.shape)}"
                )
        if pad_to < 1:
            raise ValueError(f"pad_to must be at least 1 pixel; got {pad_to}")
        H, W = (-(-max(image.shape[side] for image in images) // pad_to) * pad_to for side in (1, 2))
        num_values = len(images) * H * W * 3
        memory = torch.empty(num_values, dtype=torch.uint8) if allocate is None else allocate(num_values)
        # the channels of a pixel side by side, as decoders and resizing have them: copying in is five times as fast
        pixels = memory[:num_values].view(len(images), H, W, 3).permute(0, 3, 1, 2)  # (N, 3, H, W)
        for image, padded in zip(images, pixels, strict=True):
            h, w = image.shape[1:]
            padded[:, :h, :w].copy_(image)
            padded[:, :h, w:].zero_()
            padded[:, h:].zero_()
        return cls(pixels, torch.tensor([image.shape[1:] for image in images], dtype=torch.int64))

    @property
    def padding_mask(self) -> Tensor:
        """(N, H, W) bool, True = padding; computed anew each time, on the device and without waiting for it."""
        H, W = self.pixels.shape[2:]
        rows = torch.arange(H, device=self.pixels.device) >= self.sizes[:, 0, None]  # (N, H)
        columns = torch.arange(W, device=self.pixels.device) >= self.sizes[:, 1, None]  # (N, W)
        return rows[:, :, None] | columns[:, None, :]

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return replace(
            self,
            pixels=self.pixels.to(device, non_blocking=non_blocking),
            sizes=self.sizes.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            pixels=self.pixels.pin_memory(),
            sizes=self.sizes.pin_memory(),
        )


@dataclass(frozen=True)
class Target:
    """The ground truth of one image.

    Attributes:
        labels: (T,) int64, contiguous class indices from 0. T may be 0: a pure negative.
        boxes: (T, 4) float32, (cx, cy, w, h) in [0, 1] of the image without padding.
        image_id: The id in the annotation file.
        orig_size: (h, w) in pixels of the image in the file (after EXIF rotation), for evaluation.

    Raises:
        ValueError: A shape or dtype does not fit; on CPU tensors also a negative label, or boxes that are not
            finite or not in [0, 1].
    """

    labels: Tensor
    boxes: Tensor
    image_id: int
    orig_size: tuple[int, int]

    def __post_init__(self) -> None:
        T = self.labels.shape[0] if self.labels.ndim == 1 else -1
        if T < 0 or self.labels.dtype != torch.int64:
            raise ValueError(
                f"{self._where}: labels must be (T,) int64; got {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        if self.boxes.shape != (T, 4) or not self.boxes.is_floating_point():
            raise ValueError(
                f"{self._where}: boxes must be ({T}, 4) floating (cx, cy, w, h), one a label; got "
                f"{self.boxes.dtype} of shape {tuple(self.boxes.shape)}"
            )
        if self.labels.device.type == "cpu" and bool((self.labels.numpy() < 0).any()):
            raise ValueError(
                f"{self._where}: labels must be class indices from 0; got {int(self.labels.min())}. "
                "Map category ids to contiguous labels first"
            )
        if self.boxes.device.type == "cpu":
            values = self.boxes.detach().double().numpy()
            inside = ((values >= 0) & (values <= 1)).all(-1)  # NaN compares false, so it is outside
            if not bool(inside.all()):
                row = int(np.flatnonzero(~inside)[0])
                raise ValueError(
                    f"{self._where}: boxes must be finite (cx, cy, w, h) in [0, 1]; box {row} is "
                    f"{self.boxes[row].tolist()}. Divide by the image size and clip to the image first"
                )

    @property
    def _where(self) -> str:
        return f"Target of image {self.image_id}"

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return replace(
            self,
            labels=self.labels.to(device, non_blocking=non_blocking),
            boxes=self.boxes.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        return replace(self, labels=self.labels.pin_memory(), boxes=self.boxes.pin_memory())


@dataclass(frozen=True)
class ClassTable:
    """What the labels of a model mean: the dataset's categories by contiguous label.

    Attributes:
        names: The name of each label. Rows without a category (91-row COCO tables have 11) are named "".
        category_ids: The id of each label in the annotation file.
    """

    names: tuple[str, ...]
    category_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.category_ids):
            raise ValueError(
                f"ClassTable needs at least one class and one category id a name; got {len(self.names)} names "
                f"and {len(self.category_ids)} ids"
            )
        if len(set(self.category_ids)) != len(self.category_ids):
            raise ValueError(f"ClassTable.category_ids must differ; got {self.category_ids}")

    @property
    def num_classes(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Batch:
    """Images and their targets, in one order; what the loader yields and `train_step` takes."""

    images: ImageBatch
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.targets):
            raise ValueError(
                f"Batch needs one target an image; got {len(self.images)} images and {len(self.targets)} targets"
            )

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return replace(
            self,
            images=self.images.to(device, non_blocking=non_blocking),
            targets=tuple(target.to(device, non_blocking=non_blocking) for target in self.targets),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            images=self.images.pin_memory(),
            targets=tuple(target.pin_memory() for target in self.targets),
        )


@dataclass(frozen=True)
class LayerOutput:
    """What one set of heads says.

    Attributes:
        pred_logits: (N, Lq, C), before the sigmoid.
        pred_boxes: (N, Lq, 4), (cx, cy, w, h) in [0, 1] of the image without padding.
    """

    pred_logits: Tensor
    pred_boxes: Tensor


@dataclass(frozen=True)
class DetectorOutput:
    """What the detector says, of every decoder layer.

    Attributes:
        layer_logits: (K, N, Lq, C), before the sigmoid; the last layer is the answer.
        layer_boxes: (K, N, Lq, 4), (cx, cy, w, h) in [0, 1] of the image without padding.
        enc_outputs: Two-stage only: the proposals of all S encoder tokens, Lq = S.
    """

    layer_logits: Tensor
    layer_boxes: Tensor
    enc_outputs: LayerOutput | None = None

    @property
    def pred_logits(self) -> Tensor:
        return self.layer_logits[-1]

    @property
    def pred_boxes(self) -> Tensor:
        return self.layer_boxes[-1]

    @property
    def aux_outputs(self) -> tuple[LayerOutput, ...]:
        """The layers before the last, first to last."""
        return tuple(
            LayerOutput(logits, boxes)
            for logits, boxes in zip(self.layer_logits[:-1], self.layer_boxes[:-1], strict=True)
        )


@dataclass(frozen=True)
class Detections:
    """The detections of one image, best first.

    Attributes:
        scores: (T,) float32 in [0, 1].
        labels: (T,) int64, contiguous class indices.
        boxes: (T, 4) float32, (x0, y0, x1, y1) in pixels of the original image.
    """

    scores: Tensor
    labels: Tensor
    boxes: Tensor
