import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from detr.engine.checkpoint import Checkpoint, save_checkpoint
from detr.engine.run_folder import (
    RunFolder,
    config_differences,
    open_result_folder,
    open_run_folder,
    start_run_folder,
    write_config,
    write_json,
)

CONFIG = {"name": "a", "seed": 1, "device": "cpu", "model": {"num_queries": 10, "layers": [1, 2]}}


@pytest.fixture
def make_run(checkpoint: Checkpoint) -> Callable[..., None]:
    """Leaves what a run leaves."""

    def make(path: Path, config: dict[str, object] = CONFIG) -> None:
        write_config(path, config)
        save_checkpoint(checkpoint, path / "last.pt")

    return make


def test_a_new_folder_starts_a_run_and_is_not_made_before(tmp_path: Path):
    folder = open_run_folder(tmp_path / "runs" / "a", CONFIG, resume="auto")
    assert folder == RunFolder(tmp_path / "runs" / "a", None)
    assert not folder.path.exists()
    start_run_folder(folder, CONFIG)
    assert (folder.path / "config.yaml").is_file()
    assert (folder.path / "environment.json").is_file()


def test_the_same_run_goes_on(make_run: Callable[..., None], tmp_path: Path):
    make_run(tmp_path)
    folder = open_run_folder(tmp_path, CONFIG, resume="auto")
    assert folder.resume_from == tmp_path / "last.pt"
    assert not folder.is_new


def test_harmless_keys_may_differ(make_run: Callable[..., None], tmp_path: Path):
    make_run(tmp_path)
    other = CONFIG | {"name": "b", "device": "cuda", "resume": "auto", "logger": {"wandb": {"mode": "offline"}}}
    assert open_run_folder(tmp_path, other, resume="auto").resume_from is not None


def test_a_run_of_a_version_with_fewer_options_goes_on(make_run: Callable[..., None], tmp_path: Path):
    make_run(tmp_path)
    options = {"data": {"holdout": None}, "trainer": {"max_graphs": 32}}
    assert open_run_folder(tmp_path, CONFIG | options, resume="auto").resume_from is not None
    with pytest.raises(ValueError, match=r"data\.holdout: \(absent\) -> 0\.1"):
        open_run_folder(tmp_path, CONFIG | {"data": {"holdout": 0.1}}, resume="auto")


def test_a_different_run_is_refused_with_its_keys(make_run: Callable[..., None], tmp_path: Path):
    make_run(tmp_path)
    other = CONFIG | {"seed": 2, "model": {"num_queries": 20, "layers": [1, 2]}}
    with pytest.raises(ValueError, match="different run") as error:
        open_run_folder(tmp_path, other, resume="auto")
    assert "model.num_queries: 10 -> 20" in str(error.value)
    assert "seed: 1 -> 2" in str(error.value)
    assert "layers" not in str(error.value)
    assert "name=" in str(error.value)


def test_a_start_that_left_no_checkpoint_is_no_run(tmp_path: Path):
    write_config(tmp_path, CONFIG)
    assert open_run_folder(tmp_path, CONFIG | {"seed": 2}, resume="auto").resume_from is None


def test_resume_never_refuses_any_run(make_run: Callable[..., None], tmp_path: Path):
    assert open_run_folder(tmp_path, CONFIG, resume="never").resume_from is None
    make_run(tmp_path)
    with pytest.raises(ValueError, match="resume=never"):
        open_run_folder(tmp_path, CONFIG, resume="never")


def test_resume_from_a_path(make_run: Callable[..., None], tmp_path: Path):
    make_run(tmp_path / "old")
    last = tmp_path / "old" / "last.pt"
    changed = CONFIG | {"seed": 9}
    assert open_run_folder(tmp_path / "new", changed, resume=str(last)).is_new
    assert not open_run_folder(tmp_path / "old", changed, resume=str(last)).is_new
    make_run(tmp_path / "other")
    with pytest.raises(ValueError, match="holds a run of its own"):
        open_run_folder(tmp_path / "other", changed, resume=str(last))
    # an older checkpoint of the same folder would overwrite what came after it
    (tmp_path / "old" / "step_00000001.pt").touch()
    with pytest.raises(ValueError, match="holds a run of its own"):
        open_run_folder(tmp_path / "old", changed, resume=str(tmp_path / "old" / "step_00000001.pt"))
    with pytest.raises(FileNotFoundError, match="resume=atuo"):
        open_run_folder(tmp_path / "new", CONFIG, resume="atuo")


def test_the_same_command_that_began_from_a_path_goes_on(make_run: Callable[..., None], tmp_path: Path):
    # what a scheduler or torchrun does when it starts a run again
    make_run(tmp_path / "old")
    start = str(tmp_path / "old" / "last.pt")
    command = CONFIG | {"resume": start, "seed": 9}
    assert open_run_folder(tmp_path / "new", command, resume=start).is_new
    make_run(tmp_path / "new", command)
    again = open_run_folder(tmp_path / "new", command, resume=start)
    assert again.resume_from == tmp_path / "new" / "last.pt"
    assert not again.is_new
    with pytest.raises(ValueError, match="holds a run of its own"):
        open_run_folder(tmp_path / "new", command | {"seed": 10}, resume=start)


def test_the_newest_checkpoint_that_is_whole_is_found(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_config(tmp_path, CONFIG)
    names = ["best.pt", "step_00000004.pt", "step_00000008.pt", "last.pt"]
    for number, name in enumerate(names):
        save_checkpoint(replace(checkpoint, global_step=4 * number), tmp_path / name)
    while names:
        newest = tmp_path / names.pop()
        caplog.clear()
        assert open_run_folder(tmp_path, CONFIG, resume="auto").resume_from == newest

        assert len(caplog.records) == 3 - len(names)
        assert all(f"the run goes on from {newest.name}" in record.message for record in caplog.records)
        newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"(?s)no checkpoint is readable.*last\.pt.*best\.pt.*another name="):
        open_run_folder(tmp_path, CONFIG, resume="auto")


@pytest.mark.parametrize("write", [write_config, lambda folder, value: write_json(folder / "config.yaml", value)])
def test_a_full_disk_leaves_what_a_run_is_known_by(
    make_run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]
):
    """A resumed run writes its configuration again: cut short, the folder would seem to be another run's."""
    make_run(tmp_path / "run", CONFIG)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"config\.yaml is as it was. Make room and start the same command again"):
        write(tmp_path / "run", CONFIG)
    monkeypatch.undo()
    assert open_run_folder(tmp_path / "run", CONFIG, resume="auto").resume_from is not None
    assert not list((tmp_path / "run").glob(".*"))


def test_results_of_unknown_origin_are_left_alone(tmp_path: Path):
    (tmp_path / "best.pt").touch()
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        open_run_folder(tmp_path, CONFIG, resume="auto")


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        open_run_folder(tmp_path / "file", CONFIG, resume="auto")


def test_results_may_be_repeated_but_not_replaced(tmp_path: Path):
    write_config(tmp_path, CONFIG)
    (tmp_path / "metrics.json").touch()
    assert open_result_folder(tmp_path, CONFIG) == tmp_path
    with pytest.raises(ValueError, match="seed: 1 -> 3") as error:
        open_result_folder(tmp_path, CONFIG | {"seed": 3})
    # results are not gone on from
    assert f"name={tmp_path.name}_2" in str(error.value)
    assert "resume" not in str(error.value)


def test_differences_see_added_removed_and_empty_keys():
    old = {"a": 1, "b": {"c": None, "d": {}}, "data": {"num_workers": 2}}
    new = {"b": {"c": 0, "d": {}, "e": [1]}, "data": {"num_workers": 8}}
    assert config_differences(old, new) == [
        "a: 1 -> (absent)",
        "b.c: None -> 0",
        "b.e: (absent) -> [1]",
    ]


def test_what_yaml_reads_back_is_what_was_written(make_run: Callable[..., None], tmp_path: Path):
    # 1e-4 without a point is a string to some YAML readers
    config = CONFIG | {"lr": 1e-4, "tiny": 1e-08, "text": "1e-4", "no": "off", "none": None}
    make_run(tmp_path, config)
    assert open_run_folder(tmp_path, config, resume="auto").resume_from is not None
