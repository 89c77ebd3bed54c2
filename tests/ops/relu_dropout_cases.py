"""The kernel of relu_dropout on CPU tensors, through Triton's interpreter; run by test_relu_dropout.py."""

import pytest
import torch

from ops.relu_dropout.kernel import launch_relu_dropout

SEED = torch.tensor([1234])


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 1023), (2048,), (5, 2049)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_element_is_kept_or_dropped(shape, dtype):
    x = torch.randn(shape).to(dtype)
    y = launch_relu_dropout(x, SEED, 0.25)
    kept = (x.relu().float() / 0.75).to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y, torch.where(y == 0, 0, kept))
    assert (y[x <= 0] == 0).all()


def test_probability_and_independence_of_the_four_runs():
    x = torch.ones(4 * 1024 * 6)
    y = launch_relu_dropout(x, SEED, 0.1)
    dropped = (y == 0).view(6, 4, 1024).float()
    # five standard deviations of a mean of n draws
    assert abs(dropped.mean() - 0.1) < 5 * (0.09 / dropped.numel()) ** 0.5
    assert ((dropped.mean((0, 2)) - 0.1).abs() < 5 * (0.09 / (6 * 1024)) ** 0.5).all()
    together = (dropped[:, 0] * dropped[:, 1]).mean()
    assert abs(together - 0.01) < 5 * (0.0099 / (6 * 1024)) ** 0.5


def test_seed_decides():
    x = torch.ones(4096)
    first, again = launch_relu_dropout(x, SEED, 0.5), launch_relu_dropout(x, SEED, 0.5)
    other = launch_relu_dropout(x, SEED + 1, 0.5)
    assert torch.equal(first, again)
    assert 0.4 < (first != other).float().mean() < 0.6


def test_what_is_not_finite_stays_visible():
    x = torch.full((4096,), float("nan"))
    assert launch_relu_dropout(x, SEED, 0.5).isnan().all()


def test_strided_and_empty():
    x = torch.randn(64, 33)
    torch.testing.assert_close(launch_relu_dropout(x.T, SEED, 0.1), launch_relu_dropout(x.T.contiguous(), SEED, 0.1))
    assert launch_relu_dropout(x[:0], SEED, 0.1).shape == (0, 33)
