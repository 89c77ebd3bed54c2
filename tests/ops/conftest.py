"""Fixtures of the operator's tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory is NaN, so that a result nobody wrote does not pass for a right one."""

    def poison(function):
        def poisoned(*arguments, **keywords):
            tensor = function(*arguments, **keywords)
            if tensor.is_floating_point() and tensor.device.type != "meta" and type(tensor) is torch.Tensor:
                tensor.fill_(float("nan"))
            return tensor

        return poisoned

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
