"""What every operator asks of its arguments before it looks into them."""

import torch
from torch import Tensor


def require_tensor(name: str, given: object) -> None:
    """Return if `given`, the argument `name`, is a tensor.

    Raises:
        TypeError: It is something else, such as a NumPy array or a list.
    """
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type_name(given)}. Pass torch.as_tensor({name})")


def require_device(name: str, given: object) -> None:
    """Return if `given`, the argument `name`, is a device.

    Raises:
        TypeError: It is something else, such as its name.
    """
    if not isinstance(given, torch.device):
        raise TypeError(f"{name} must be a torch.device; got {type_name(given)}. Pass torch.device({name})")


def type_name(given: object) -> str:
    """The type of `given` as people write it: list, numpy.ndarray."""
    kind = type(given)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
