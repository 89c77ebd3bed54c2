"""Box arithmetic against torchvision."""

import torch
from torchvision.ops import box_convert, generalized_box_iou

from detr.boxes import box_area, inverse_sigmoid, paired_generalized_box_iou


def random_boxes(count, dtype=torch.float64):
    return box_convert(torch.rand(count, 4, dtype=dtype) * 0.5 + 0.05, "cxcywh", "xyxy")


def test_paired_giou_is_the_diagonal_of_torchvision():
    torch.manual_seed(0)
    a, b = random_boxes(50), random_boxes(50)
    torch.testing.assert_close(paired_generalized_box_iou(a, b), generalized_box_iou(a, b).diag())
    # broadcasting gives all pairs
    torch.testing.assert_close(paired_generalized_box_iou(a[:, None], b), generalized_box_iou(a, b))


def test_giou_gradient():
    torch.manual_seed(0)
    a, b = random_boxes(6).requires_grad_(), random_boxes(6).requires_grad_()
    assert torch.autograd.gradcheck(paired_generalized_box_iou, (a, b))


def test_boxes_without_area_are_finite_with_finite_gradient():
    point = torch.tensor([[0.5, 0.5, 0.5, 0.5]])
    line = torch.tensor([[0.5, 0.2, 0.5, 0.8]])
    box = torch.tensor([[0.1, 0.1, 0.4, 0.4]])
    for first in (point, line, box):
        for second in (point, line, box):
            predicted = first.clone().requires_grad_()
            giou = paired_generalized_box_iou(predicted, second)
            giou.sum().backward()
            assert giou.isfinite().all()
            assert predicted.grad.isfinite().all()


def test_area():
    assert box_area(torch.tensor([[1.0, 2.0, 4.0, 7.0]])).item() == 15


def test_inverse_sigmoid_inverts_inside():
    x = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    torch.testing.assert_close(inverse_sigmoid(x).sigmoid(), x)
