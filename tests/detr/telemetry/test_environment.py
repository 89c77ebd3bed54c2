"""What a run says about its surroundings."""

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import detr
from detr.telemetry import environment
from detr.telemetry.environment import code_facts, collect_environment, format_environment


def test_environment_is_plain_json_without_names_of_machines_or_people():
    collected = collect_environment()
    text = json.dumps(collected, allow_nan=False)
    assert json.loads(text) == collected
    assert collected["versions"]["torch"] == torch.__version__
    assert collected["python"] == platform.python_version()
    assert platform.node() not in text
    assert str(Path.home()) not in text


def test_packages_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "_DISTRIBUTIONS", ("torch", "surely-not-installed"))
    assert collect_environment()["versions"]["surely-not-installed"] is None


@pytest.mark.parametrize("name", ["telemetry/environment.py", "new.py", "csrc/kernel.cuh"])
def test_code_that_differs_in_any_source_is_told_apart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = code_facts(detr)
    assert own == code_facts(detr)
    assert own["torch"] == torch.__version__
    copied = tmp_path / "detr"
    shutil.copytree(Path(detr.__path__[0]), copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(detr, "__path__", [str(copied)])
    # where it lies, and what Python leaves beside it, make no difference
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert code_facts(detr) == own
    changed = copied / name
    changed.parent.mkdir(exist_ok=True)
    changed.write_text((changed.read_text() if changed.exists() else "") + "\n")
    assert code_facts(detr)["sources"] != own["sources"]


def run_git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_commit_of_the_work_tree_and_its_changes(tmp_path: Path):
    source = tmp_path / "code.py"
    source.write_text("before\n")
    run_git(tmp_path, "init", "-q")
    # not tracked: the repository is somebody else's, as around a virtual environment
    assert environment._git_state(source) is None
    run_git(tmp_path, "add", "code.py")
    run_git(tmp_path, "commit", "-q", "-m", "first")
    commit = run_git(tmp_path, "rev-parse", "HEAD").strip()
    assert environment._git_state(source) == {"commit": commit, "dirty": False}
    source.write_text("after\n")
    assert environment._git_state(source) == {"commit": commit, "dirty": True}


def test_outside_git_there_is_no_commit(tmp_path: Path):
    assert environment._git_state(tmp_path / "code.py") is None
    monkeypatched = {**collect_environment(), "git": None}
    assert "not in git" in format_environment(monkeypatched)


def test_start_up_block_has_hardware_versions_commit_and_the_run():
    collected = {
        **collect_environment(),
        "gpus": [{"name": "GPU X", "memory_gib": 140.0, "compute_capability": "9.0"}],
        "driver": "580.1",
        "git": {"commit": "0123456789abcdef", "dirty": True},
    }
    block = format_environment(collected, {"kernel": "triton", "images per step": 32})
    assert "GPU X (140 GiB)" in block
    assert f"torch {torch.__version__}" in block
    assert "driver 580.1" in block
    assert "0123456789ab + changes" in block
    assert "images per step  32" in block.splitlines()
