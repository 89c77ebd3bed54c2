"""Weight files, whatever else is in them."""

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from detr.checkpoints.files import read_tensors, write_tensors

WEIGHTS = OrderedDict(a=torch.arange(3.0), b=torch.ones(2, dtype=torch.int64))


class Settings:
    """A class that the reader must not need."""

    def __init__(self) -> None:
        self.names = ["x"]


class Harmful:
    """Runs a command when it is unpickled in the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrapper", ["model", "state_dict", None])
def test_weights_beside_objects(wrapper: str | None, legacy: bool, tmp_path: Path):
    extras = {"args": argparse.Namespace(lr=1e-4), "meta": Settings(), "epoch": 3, "optimizer": {"lr": [0.1]}}
    content = {wrapper: WEIGHTS, **extras} if wrapper else WEIGHTS
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy)
    tensors = read_tensors(tmp_path / "w.pth")
    assert list(tensors) == ["a", "b"]
    assert torch.equal(tensors["a"], WEIGHTS["a"])
    assert tensors["b"].dtype == torch.int64


def test_parameters_and_the_wrapper_of_ddp(tmp_path: Path):
    weights = {f"module.{name}": torch.nn.Parameter(tensor.float()) for name, tensor in WEIGHTS.items()}
    torch.save({"model": weights}, tmp_path / "w.pth")
    tensors = read_tensors(tmp_path / "w.pth")
    assert list(tensors) == ["a", "b"]
    assert not tensors["a"].requires_grad


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_run(legacy: bool, tmp_path: Path):
    torch.save(
        {"model": WEIGHTS, "args": Harmful(tmp_path / "run")},
        tmp_path / "w.pth",
        _use_new_zipfile_serialization=not legacy,
    )
    assert list(read_tensors(tmp_path / "w.pth")) == ["a", "b"]
    assert not (tmp_path / "run").exists()
    # the file does what the test believes
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "w.pth", weights_only=True)
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert (tmp_path / "run").exists()


def test_safetensors_and_folders(tmp_path: Path):
    write_tensors(WEIGHTS, tmp_path / "folder" / "model.safetensors")
    assert torch.equal(read_tensors(tmp_path / "folder")["b"], WEIGHTS["b"])
    write_tensors(WEIGHTS, tmp_path / "other" / "w.pth")
    assert torch.equal(read_tensors(tmp_path / "other" / "w.pth")["b"], WEIGHTS["b"])
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        read_tensors(tmp_path / "other")


def test_what_is_no_weight_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="check the path"):
        read_tensors(tmp_path / "none.pth")
    for name, content in (("text.pth", b"hello"), ("empty.pth", b""), ("cut.safetensors", b"\x10\0\0\0\0\0\0\0{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            read_tensors(tmp_path / name)
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    with pytest.raises(ValueError, match="holds no weights by name, but epoch"):
        read_tensors(tmp_path / "none.pth")
    torch.save({"model": WEIGHTS}, tmp_path / "w.pth")
    (tmp_path / "w.pth").write_bytes((tmp_path / "w.pth").read_bytes()[:300])
    with pytest.raises(ValueError, match="cut short"):
        read_tensors(tmp_path / "w.pth")
