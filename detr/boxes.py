"""What torchvision.ops lacks for DETR's boxes. Format conversion is `torchvision.ops.box_convert`."""

import torch
from torch import Tensor


def paired_generalized_box_iou(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """Generalised IoU (arXiv 1902.09630) of boxes1[i] with boxes2[i], broadcasting the leading dimensions.

    Never NaN for finite input: a pair without area has IoU 0, and one without a hull has no hull penalty.
    The gradient is zero where that guard acts.

    Args:
        boxes1: (..., 4) floating (x0, y0, x1, y1) with x1 >= x0, y1 >= y0.
        boxes2: (..., 4), likewise.

    Returns:
        (...) in [-1, 1].
    """
    left_top = torch.maximum(boxes1[..., :2], boxes2[..., :2])
    right_bottom = torch.minimum(boxes1[..., 2:], boxes2[..., 2:])
    overlap = (right_bottom - left_top).clamp(min=0)
    intersection = overlap[..., 0] * overlap[..., 1]
    union = box_area(boxes1) + box_area(boxes2) - intersection
    iou = _guarded_ratio(intersection, union)
    hull_left_top = torch.minimum(boxes1[..., :2], boxes2[..., :2])
    hull_right_bottom = torch.maximum(boxes1[..., 2:], boxes2[..., 2:])
    hull_sides = (hull_right_bottom - hull_left_top).clamp(min=0)
    hull = hull_sides[..., 0] * hull_sides[..., 1]
    return iou - _guarded_ratio(hull - union, hull)


def box_area(boxes: Tensor) -> Tensor:
    """Area (...) of boxes (..., 4) given as (x0, y0, x1, y1), with any leading dimensions."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _guarded_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    positive = denominator > 0
    # the inner where keeps 0 / 0 out of the gradient, which the outer one alone would turn into NaN
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


def inverse_sigmoid(coordinates: Tensor, eps: float = 1e-5) -> Tensor:
    """Logit of `coordinates` in [0, 1], which are clamped to [eps, 1 - eps] on each side of the fraction.

    Recipe of Deformable DETR: numerator and denominator are clamped apart, so 0 and 1 stay finite.
    """
    coordinates = coordinates.clamp(0, 1)
    return torch.log(coordinates.clamp(min=eps) / (1 - coordinates).clamp(min=eps))
