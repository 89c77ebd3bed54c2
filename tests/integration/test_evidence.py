"""Scripts of evidence: paths reach the tools whole, and what cannot run says so at once."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "evidence.sh"
# says what it was given, in place of the tools
PROGRAM = """#!/usr/bin/env bash
[[ "$1" != -c ]] || { echo 8; exit; }
printf '%s\\n' "${@:2}" > "$SAID"
exit 1
"""


@pytest.fixture
def keys_given(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The keys that a script gives to its first tool, as Hydra reads them."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    for program in ("bin/python", ".venv/bin/python", ".venv/bin/torchrun"):
        stand_in = tmp_path / program
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(PROGRAM)
        stand_in.chmod(0o755)

    def give(part: str, *, script: str = "evidence.sh", **variables: str) -> dict[str, Any]:
        said = tmp_path / "said"
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | variables | {"SAID": str(said), "PATH": path}
        command = ["bash", str(tmp_path / "scripts" / script), part]
        subprocess.run(command, env=environment, capture_output=True, check=False)
        keys = [text for text in said.read_text().splitlines() if "=" in text and not text.startswith("--")]
        return {override.key_or_group: override.value() for override in OverridesParser.create().parse_overrides(keys)}

    return give


@pytest.mark.parametrize("name", ["plain", "two words", "a,b", "a=b", "(1)", "it's", "x\\"])
def test_paths_reach_the_tools_whole(keys_given: Callable[..., dict[str, Any]], tmp_path: Path, name: str):
    odd = tmp_path / name
    kernels = keys_given("kernels", OUT=str(odd), DATA=str(odd), WEIGHTS=f"{odd}/w.pt")
    assert kernels["output_dir"] == f"{odd}/kernels"
    inner = OverridesParser.create().parse_overrides([str(key) for key in kernels["train"]])
    assert [key.value() for key in inner[:2]] == [str(odd), f"{odd}/w.pt"]
    run = odd / "kernels" / "runs" / "triton_bf16_seed0"
    run.mkdir(parents=True)
    for step in (1, 2):
        (run / f"step_{step}.pt").touch()
    gradients = keys_given("gradients", OUT=str(odd))
    assert [str(path) for path in gradients["checkpoints"]] == [f"{run}/step_1.pt", f"{run}/step_2.pt"]
    assert keys_given("flops", script="benchmark_findings.sh", OUT=str(odd))["output_dir"] == str(odd)
    assert keys_given("kernels", script="benchmark_matrix.sh", OUT=str(odd))["output_dir"] == f"{odd}/runs/kernels"
    r50 = keys_given("r50_50ep", script="reproduce_r50.sh", DATA=str(odd), BATCH="4", GPUS="1")
    assert r50["data.root"] == str(odd)


def test_keys_of_plain_paths_stay_as_they_were(keys_given: Callable[..., dict[str, Any]], tmp_path: Path):
    """A comparison knows its rows by them."""
    given = keys_given("kernels", OUT=str(tmp_path / "out"), DATA="/d", WEIGHTS="/w.pt")
    assert [str(key) for key in given["train"]][:2] == ["data.root=/d", "backbone.pretrained=/w.pt"]


def test_gradients_before_kernels_says_so(tmp_path: Path):
    command = ["bash", str(SCRIPT), "gradients"]
    ended = subprocess.run(
        command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "run the part kernels first" in ended.stderr


@pytest.mark.parametrize("script", ["prove_scaling.sh", "test_two_gpus.sh", "train_multi_gpu.sh"])
@pytest.mark.parametrize("gpus", ["99", "0", "-1", "abc", "2x", "a[0]"])
def test_gpus_that_are_not_there_are_refused_at_once(tmp_path: Path, script: str, gpus: str):
    """Not trained on the CPU instead, nor after the part that one GPU does."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    # a machine with one GPU
    python.write_text("#!/usr/bin/env bash\n[[ $1 == -c ]] && echo 1 || echo STARTED\n")
    shutil.copy(python, python.with_name("torchrun"))
    for program in (python, python.with_name("torchrun")):
        program.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(tmp_path / "scripts" / script)],
        env=os.environ | {"GPUS": gpus, "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "STARTED" not in ended.stdout
    expected = (
        "GPUS=99, but PyTorch sees 1" if gpus == "99" else f"GPUS is a number of GPUs, at least [12]; got GPUS={gpus}"
    )
    assert re.search(expected.replace("a[0]", r"a\[0\]"), ended.stderr), ended.stderr
