"""Weight files of other codebases, read without running code from them."""

import collections
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

# where trainers keep the weights in what they save, in order of preference
_WRAPPERS = ("model", "state_dict", "model_state_dict")


class _Inert:
    """Stands for any object of a class that is not needed for tensors; does nothing with what it is given."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> "_Inert":
        return self

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Lists are rebuilt with it."""

    def extend(self, values: object) -> None:
        """Lists are rebuilt with it."""


class _TensorUnpickler(pickle.Unpickler):
    """Rebuilds tensors and plain containers; every other class or function in the file becomes `_Inert`."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module_name == "torch._utils" and global_name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(torch._utils, global_name)
        if module_name in ("torch", "torch.storage") and global_name.endswith("Storage"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype | type(torch.Size)):
            return getattr(torch, global_name)
        return _Inert


class _TensorPickle:
    """What `torch.load` asks of a pickle module."""

    Unpickler = _TensorUnpickler
    load = staticmethod(lambda file, **_: _TensorUnpickler(file).load())


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors by name of a .pth, .pt, .bin or .safetensors file, or of a folder that Hugging Face wrote.

    Pickled files often hold settings beside the weights, as objects of classes that are not installed here; those
    are dropped unread, and nothing in the file is run.

    Raises:
        FileNotFoundError: There is no such file, or no weights in the folder.
        ValueError: The file is no weight file, or is damaged.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        candidates = [path / "model.safetensors", path / "pytorch_model.bin"]
        found = [candidate for candidate in candidates if candidate.is_file()]
        if not found:
            raise FileNotFoundError(
                f"{path} holds neither model.safetensors nor pytorch_model.bin; give the file with the weights"
            )
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"no weight file at {path} (looked in {path.absolute().parent}); check the path")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}); is it cut short?") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_TensorPickle)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as a PyTorch weight file ({type(error).__name__}: {error}); is it cut short, or of "
            "another format?"
        ) from error
    return _tensors_in(content, path)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, *, wrapper: str = "model") -> None:
    """Write weights to a .safetensors file, or as {wrapper: tensors} to a .pth file, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        # the format knows no tensor under two names
        contiguous = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        # transformers refuses files that do not say whose layout the tensors have
        safetensors.torch.save_file(contiguous, path, metadata={"format": "pt"})
    else:
        torch.save({wrapper: dict(tensors)}, path)


def _tensors_in(content: Any, path: Path) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    tensors = (
        {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, dict)
        else {}
    )
    if not tensors:
        found = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds no weights by name, but {found}; give the file that training saved")
    # DDP's wrapper
    if all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors
