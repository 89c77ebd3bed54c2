"""From what the detector says to detections in pixels (recipe section 5.6).

Shapes: N images, Lq queries, C classes, T detections an image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr.structures import Detections, DetectorOutput


def top_detections(
    pred_logits: Tensor, pred_boxes: Tensor, orig_sizes: Tensor, *, max_detections: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best (query, class) pairs of each image, best first, computed in float32 on the inputs' device.

    One query may appear with several classes. There is no threshold, no NMS, and boxes are not clipped to the
    image: average precision ranks by score and needs none of them.

    Args:
        pred_logits: (N, Lq, C) floating, before the sigmoid.
        pred_boxes: (N, Lq, 4) floating, (cx, cy, w, h) in [0, 1] of the image without padding.
        orig_sizes: (N, 2), (h, w) in pixels of the image in the file.
        max_detections: Detections an image; all Lq * C pairs where there are fewer.

    Returns:
        scores (N, T) float32 in [0, 1], labels (N, T) int64 and boxes (N, T, 4) float32, (x0, y0, x1, y1) in
        pixels of the original image; T = min(max_detections, Lq * C).
    """
    N, Lq, C = pred_logits.shape
    T = min(max_detections, Lq * C)
    probabilities = pred_logits.float().sigmoid().flatten(1)  # (N, Lq * C)
    scores, pairs = probabilities.topk(T, dim=1)  # (N, T)
    queries = pairs // C  # (N, T)
    labels = pairs % C  # (N, T)
    boxes = box_convert(pred_boxes.float(), "cxcywh", "xyxy")  # (N, Lq, 4)
    boxes = boxes.gather(1, queries[..., None].expand(N, T, 4))
    height_px, width_px = orig_sizes.to(boxes).unbind(1)  # (N,) each
    scale_px = torch.stack([width_px, height_px, width_px, height_px], dim=1)  # (N, 4) as (x, y, x, y)
    return scores, labels, boxes * scale_px[:, None]


@dataclass(frozen=True)
class PostProcess:
    """Turns a batch's output into one `Detections` an image, on the CPU. See :func:`top_detections`.

    Attributes:
        max_detections: Detections an image, over all classes together. COCO's own limit of 100 is one an
            image and class, so 300 here measures about 0.1 to 0.2 AP more than the original's 100.
    """

    max_detections: int = 100

    def __post_init__(self) -> None:
        if self.max_detections < 1:
            raise ValueError(f"max_detections must be at least 1; got {self.max_detections}")

    def __call__(self, output: DetectorOutput, orig_sizes: Tensor) -> list[Detections]:
        """Detections of each image, in the order of the batch.

        Reads the device once a batch: scores, labels and boxes travel in one tensor.

        Args:
            output: The detector's, on any device and in any floating dtype.
            orig_sizes: (N, 2), (h, w) in pixels of the image in the file, on any device.

        Raises:
            ValueError: `orig_sizes` is not (N, 2).
        """
        logits, boxes = output.pred_logits, output.pred_boxes
        if orig_sizes.shape != (logits.shape[0], 2):
            raise ValueError(
                f"orig_sizes must be ({logits.shape[0]}, 2), one (h, w) an image of the output; got shape "
                f"{tuple(orig_sizes.shape)}"
            )
        # a float32 holds class indices exactly up to 2^24
        scores, labels, boxes = top_detections(
            logits,
            boxes,
            orig_sizes.to(boxes.device, non_blocking=True),
            max_detections=self.max_detections,
        )
        packed = torch.cat([scores[..., None], labels[..., None].float(), boxes], dim=-1).cpu()  # (N, T, 6)
        return [Detections(scores=row[:, 0], labels=row[:, 1].long(), boxes=row[:, 2:]) for row in packed]
