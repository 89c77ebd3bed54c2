"""A device type that PyTorch does not know, played by the CPU, and a run of training on it.

Trains two steps on the CPU and on the device and prints both in a line, then runs tools/train.py with the arguments it
got. A process of its own, since a device type is registered for good. Every function of torch.cuda raises meanwhile.

The tensors of the device are wrappers: they say `npu`, refuse to meet tensors of the CPU as a real device does, and
keep their numbers on the CPU. Such a device has no autocast, no pinned memory, no events and no streams of its own.
"""

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import torch

# it looks into torch.cuda when it is imported
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
# what PyTorch itself asks on every device
ASKED_BY_TORCH = {"is_available", "device_count", "is_initialized", "manual_seed", "manual_seed_all"}
# operators that may see both devices, as everywhere in PyTorch
COPIES = {"aten::_to_copy", "aten::copy_"}


class DeviceTensor(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def pin_memory(self, device: object = None) -> Tensor:
        raise RuntimeError("cannot pin memory of the device")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class EmulatedDevice(TorchDispatchMode):
    """Makes tensors that are asked for on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
    if on_device and strangers and func._schema.name not in COPIES:
        raise RuntimeError(f"{func} got tensors on {NAME}:0 and on the CPU")
    if kwargs.get("pin_memory"):
        raise RuntimeError("cannot pin memory without a CUDA device")
    asked = kwargs.get("device")
    is_for_device = bool(on_device) if asked is None else torch.device(asked).type == NAME
    plain_args, plain_kwargs = tree_map(lambda x: x.numbers if isinstance(x, DeviceTensor) else x, (args, kwargs))
    if asked is not None:
        plain_kwargs["device"] = torch.device("cpu")
    result = func(*plain_args, **plain_kwargs)
    if not is_for_device:
        return result
    # what an operator wrote in place is the tensor that it was given
    known = {id(tensor.numbers): tensor for tensor in on_device}
    return tree_map_only(
        Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else DeviceTensor(tensor), result
    )


def hide_cuda() -> None:
    """Make every function of torch.cuda raise, and its events and streams."""

    def forbidden(name: str) -> Any:
        def call(*args: object, **kwargs: object) -> None:
            raise AssertionError(f"torch.cuda.{name} was called on {NAME}")

        return call

    for name in torch.cuda.__all__:
        is_function = inspect.isfunction(getattr(torch.cuda, name, None)) or name in ("Event", "Stream")
        if is_function and name not in ASKED_BY_TORCH:
            setattr(torch.cuda, name, forbidden(name))
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


def train_steps() -> dict[str, list[list[float]]]:
    """Loss and gradient norm of two steps, on each device."""
    from detr.distributed import init_distributed
    from detr.engine.checkpoint_writer import host_copy
    from detr.engine.step import train_step

    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("engine_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    numbers: dict[str, list[list[float]]] = {}
    for device in ("cpu", NAME):
        state = parts.make_state(context=init_distributed(device), ema_decay=0.9)
        assert {parameter.device.type for parameter in state.model.parameters()} == {device}
        results = [train_step(state, [batch]) for batch in parts.make_batches([[1, 2], [0, 3]])]
        assert {result.loss.device.type for result in results} == {device}
        numbers[device] = [[result.loss.item(), result.grad_norm.item(), result.skipped.item()] for result in results]
        copy, ready = host_copy(state.model.state_dict())
        assert ready is None
        assert {tensor.device.type for tensor in copy.values()} == {"cpu"}
    return numbers


if __name__ == "__main__":
    hide_cuda()
    _setup_privateuseone_for_python_backend(NAME)
    with EmulatedDevice():
        print(json.dumps(train_steps()))
        import tools.train

        tools.train.main()
