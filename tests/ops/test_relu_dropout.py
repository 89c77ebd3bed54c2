"""relu_dropout: PyTorch's distribution and gradient, on any device."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ops import relu_dropout
from ops.relu_dropout.functional import masked_gradient

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_and_gradient(device, dtype):
    x = torch.randn(37, 129, device=device, dtype=dtype, requires_grad=True)
    y = relu_dropout(x, 0.25, training=True)
    kept = (x.detach().double().relu() / 0.75).to(dtype)
    torch.testing.assert_close(y, torch.where(y == 0, torch.zeros_like(kept), kept))
    share = (y[x > 0] == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / (x > 0).sum().item()) ** 0.5
    grad_output = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, grad_output)
    torch.testing.assert_close(grad, torch.where(y > 0, grad_output / 0.75, 0), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_repeat_and_calls_differ(device):
    x = torch.ones(4096, device=device)
    torch.manual_seed(3)
    first, second = relu_dropout(x, 0.5, training=True), relu_dropout(x, 0.5, training=True)
    torch.manual_seed(3)
    assert torch.equal(relu_dropout(x, 0.5, training=True), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_dropped_outside_training_and_all_with_one(device):
    x = torch.randn(64, device=device)
    assert torch.equal(relu_dropout(x, 0.5, training=False), x.relu())
    assert torch.equal(relu_dropout(x, 0.0, training=True), x.relu())
    assert not relu_dropout(x, 1.0, training=True).any()


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_is_asked_for(p):
    with pytest.raises(ValueError, match="probability"):
        relu_dropout(torch.ones(1), p, training=True)


def test_gradient_from_the_output_is_dropouts_own():
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    y = F.dropout(x.relu(), 0.3)
    grad_output = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, grad_output)
    torch.testing.assert_close(masked_gradient(grad_output, y.detach(), 0.3), expected)


def test_kernel_through_the_interpreter(interpret):
    interpret(Path(__file__).with_name("relu_dropout_cases.py"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnTheGPU:
    def test_compiled_whole_with_gradients(self):
        x = torch.randn(33, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(lambda x: relu_dropout(x, 0.25, training=True).float().square(), fullgraph=True)
        y = compiled(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad.float(), torch.where(y > 0, 2 * y.sqrt() / 0.75, 0), rtol=2e-2, atol=1e-3)

    def test_keeps_only_its_output(self):
        x = torch.randn(64, 1024, device="cuda", requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = relu_dropout(x * 1, 0.1, training=True)
        assert [t.data_ptr() for t in kept if t.numel() == y.numel()] == [y.data_ptr()]

    def test_a_captured_graph_draws_anew(self):
        x = torch.ones(4096, device="cuda")
        relu_dropout(x, 0.5, training=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = relu_dropout(x, 0.5, training=True)
        graph.replay()
        first = y.clone()
        graph.replay()
        assert 0.3 < (first != y).float().mean().item() < 0.7
