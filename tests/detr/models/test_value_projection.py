"""Values projected together are those of each layer, with the same gradients, under autocast too."""

import pytest
import torch
from torch import nn

from detr.models.value_projection import project_together


def outputs_and_gradients(project, memory, projections, weights):
    values = project(memory, projections)
    loss = sum((value.double() * weight).sum() for value, weight in zip(values, weights, strict=True))
    parameters = [parameter for projection in projections for parameter in projection.parameters()]
    return [*values, *torch.autograd.grad(loss, [memory, *parameters])]


def project_apart(memory, projections):
    return [projection(memory) for projection in projections]


@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients(autocast):
    dtype = torch.float32 if autocast else torch.float64
    projections = [nn.Linear(16, 16).to(dtype) for _ in range(3)]
    memory = torch.randn(2, 35, 16, dtype=dtype, requires_grad=True)
    weights = [torch.randn(2, 35, 16, dtype=torch.float64) for _ in projections]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        together = outputs_and_gradients(project_together, memory, projections, weights)
        apart = outputs_and_gradients(project_apart, memory, projections, weights)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if autocast else {"rtol": 1e-12, "atol": 1e-12}
    for value, expected in zip(together, apart, strict=True):
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected, **tolerance)
    assert all(value.is_contiguous() for value in together[:3])


def test_second_derivative():
    projections = [nn.Linear(3, 3).double() for _ in range(2)]
    memory = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda memory: project_together(memory, projections), (memory,))
