"""The experiments of the findings on a GPU: right by the rule of the kernels, and presets that run."""

import pytest
import torch

from detr.benchmark.findings.dispatch_order import OrderCase, missed_bound
from detr.benchmark.findings.orders import ORDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible to torch"),
]

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "direction"), [("cuda", "forward"), ("cuda", "backward"), ("point_parallel", "forward")]
)
@pytest.mark.parametrize(("num_levels", "num_points"), [(1, 2), (4, 4), (5, 8)])
def test_every_order_is_right(kernel, direction, order, num_levels, num_points):
    case = OrderCase(kernel, direction, "bf16", 2, num_levels, num_points)
    assert not missed_bound(case, order=order, device=DEVICE)
