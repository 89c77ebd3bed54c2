import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.engine import checkpoint as module
from detr.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from detr.engine.checkpoint_files import copy_file
from detr.engine.random_state import random_state, restore_random_state, seed_everything


def test_round_trip_without_pickle(checkpoint: Checkpoint, tmp_path: Path):
    path = tmp_path / "last.pt"
    save_checkpoint(checkpoint, path)
    raw = torch.load(path, weights_only=True)
    assert raw["class_table"] == {"names": ["cat", "犬"], "category_ids": [7, 90]}
    assert raw["config"] == checkpoint.config
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.model["weight"], checkpoint.model["weight"])
    for field in ("epoch", "global_step", "class_table", "preprocessing", "config", "metrics", "best", "optimizer"):
        assert getattr(loaded, field) == getattr(checkpoint, field), field
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_random_streams_continue(checkpoint: Checkpoint, tmp_path: Path):
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    device = torch.device("cpu")
    seed_everything(3, rank=1)
    draw()
    save_checkpoint(replace(checkpoint, random_states=[random_state(device)]), tmp_path / "last.pt")
    expected = [draw() for _ in range(3)]
    seed_everything(4, rank=0)
    restore_random_state(load_checkpoint(tmp_path / "last.pt").random_states[0], device)
    assert [draw() for _ in range(3)] == expected


def test_averaged_weights_are_the_evaluated_ones(checkpoint: Checkpoint):
    average = {"num_updates": 1, "model": {"weight": torch.zeros(3)}}
    assert checkpoint.weights is checkpoint.model
    assert replace(checkpoint, ema=average).weights is average["model"]


def test_a_failing_save_leaves_the_old_file(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "last.pt"
    save_checkpoint(checkpoint, path)

    def full_disk(payload: Any, file: Any) -> None:
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(replace(checkpoint, epoch=4), path)
    assert load_checkpoint(path).epoch == 3
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_nothing_but_plain_values_gets_in(checkpoint: Checkpoint, tmp_path: Path):
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(replace(checkpoint, config={"path": tmp_path}), tmp_path / "last.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_links", [True, False])
def test_copy_replaces_the_target(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
):
    if not has_links:

        def refuse(source: Path, target: Path) -> None:
            raise OSError("no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    save_checkpoint(checkpoint, last)
    copy_file(last, best)
    save_checkpoint(replace(checkpoint, epoch=4), last)
    assert (load_checkpoint(best).epoch, load_checkpoint(last).epoch) == (3, 4)
    copy_file(last, best)
    assert load_checkpoint(best).epoch == 4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_missing_file_names_its_neighbours(checkpoint: Checkpoint, tmp_path: Path):
    save_checkpoint(checkpoint, tmp_path / "last.pt")
    with pytest.raises(FileNotFoundError, match=r"is a folder, where a checkpoint file.*; that folder has last\.pt"):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*lst\.pt; that folder has last\.pt"):
        load_checkpoint(tmp_path / "lst.pt")
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
        load_checkpoint(tmp_path / "nowhere" / "last.pt")


def _truncated(path: Path, checkpoint: Checkpoint) -> None:
    save_checkpoint(checkpoint, path)
    path.write_bytes(path.read_bytes()[:-400])


def _pickled_object(path: Path, checkpoint: Checkpoint) -> None:
    torch.save({"args": checkpoint.class_table}, path)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path, checkpoint: path.write_bytes(b""), "damaged, cut short or not ours"),
        (lambda path, checkpoint: path.write_text("no checkpoint"), "damaged, cut short or not ours"),
        (_truncated, "damaged, cut short or not ours"),
        (_pickled_object, "damaged, cut short or not ours"),
        (lambda path, checkpoint: torch.save({"model": {}}, path), "it holds model"),
        (lambda path, checkpoint: torch.save([1], path), "it holds list"),
        (lambda path, checkpoint: torch.save({"format_version": 99}, path), "checkpoint format 99"),
    ],
)
def test_files_that_are_no_checkpoint(
    write: Callable[[Path, Checkpoint], Any], words: str, checkpoint: Checkpoint, tmp_path: Path
):
    write(tmp_path / "file.pt", checkpoint)
    with pytest.raises(ValueError, match=words):
        load_checkpoint(tmp_path / "file.pt")
