"""On a GPU, a copy between host and device inside the step makes the host wait. Found here without a GPU.

Fake tensors carry a CUDA device through forward and loss; every operator that touches two devices, or reads a value,
is recorded. Backward needs a real device: test_step_gpu.py runs whole steps.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from detr.losses import HungarianMatcher, Matches, SetCriterion
from detr.structures import Target
from ops import KernelConfig

DEVICE = torch.device("cuda", 0)
VARIANTS = {
    "plain": {},
    "refine": {"with_box_refine": True, "look_forward_twice": True},
    "two_stage": {"with_box_refine": True, "two_stage": True, "exclude_padding_proposals": True},
}


class Copies(TorchDispatchMode):
    """Records operators that see two devices, or take a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_flatten((args, kwargs, result))[0] if isinstance(x, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1 or "_local_scalar_dense" in str(func):
            self.found.append(str(func))
        return result


class GivenMatches(HungarianMatcher):
    """Matches of the right shapes: the real matcher's one copy is not what is tested."""

    def match(self, problems):
        matches = []
        for problem in problems:
            rows = sum(problem.targets.counts)
            index = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
            matches.append(Matches(index, *(index.expand(len(problem.logits), -1) for _ in range(2))))
            self.cost(problem)
        return matches


def test_the_recorder_sees_what_it_is_for():
    with FakeTensorMode(), Copies() as copies:
        x = torch.zeros(4, device=DEVICE)
        index = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        x.index_put_((index,), x.new_ones(()))
        assert copies.found == []
        x[index] = 1.0
        assert len(copies.found) == 1
        x.to("cpu")
        assert len(copies.found) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_loss_stay_on_the_device(variant, small_detector):
    # the kernels of the real GPU need one; the reference runs on any device, a fake one included
    with torch.device("meta"):
        model = small_detector(kernel=KernelConfig(backend="reference"), **VARIANTS[variant])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=DEVICE)
    with next(model.parameters()).fake_mode, torch.device(DEVICE):
        criterion = SetCriterion(num_classes=5, matcher=GivenMatches())
        channels, strides = model.backbone.channels, model.backbone.strides
        features = [torch.rand(2, c, 96 // s, 128 // s) for c, s in zip(channels, strides, strict=True)]
        padding_mask = torch.zeros(2, 96, 128, dtype=torch.bool)
        targets = [
            Target(torch.zeros(count, dtype=torch.int64), torch.rand(count, 4), image_id=0, orig_size=(96, 128))
            for count in (3, 0)
        ]
        num_boxes = torch.full((), 3.0)
        with Copies() as copies:
            criterion(model.forward_features(features, padding_mask), targets, num_boxes)
    assert copies.found == []
