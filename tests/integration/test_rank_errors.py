"""Ranks under torchrun: an error that all meet is said once, and is the end of what torchrun reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import launcher


@pytest.mark.parametrize(
    ("override", "message"),
    [("data.batch_size=0", "needs batch_size >= 1"), ("data.batch_sice=2", "batch_sice")],
    ids=["a value", "a key"],
)
def test_an_error_of_all_ranks_is_said_once_and_last(
    override: str, message: str, tmp_path: Path, run_script: Callable[..., Any], repository: Path
):
    arguments = ["experiment=debug_cpu", "device=cpu", override]
    said = run_script(repository / "tools" / "train.py", *arguments, ranks=2, cwd=tmp_path, code=1).stderr
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message in line
    report = said[said.index("Root Cause") :]
    assert message in report


def test_an_error_of_one_rank_is_said_too(tmp_path: Path, run_script: Callable[..., Any]):
    script = tmp_path / "one_rank.py"
    script.write_text(
        "import os, time\n"
        "from tools.launcher import fail\n"
        "fail('the second is broken') if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    said = run_script(script, ranks=2, cwd=tmp_path, code=1).stderr
    assert said.count("error: the second is broken") == 1
    assert "the second is broken" in said[said.index("Root Cause") :]


def test_on_each_of_several_machines_the_first_rank_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torchrun ends the ranks of its own machine: those of others would all say it after the wait."""
    slept: list[float] = []
    monkeypatch.setattr(launcher.time, "sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank, local_rank, has_to_wait in ((0, 0, False), (1, 1, True), (8, 0, False), (9, 1, True)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        slept.clear()
        with pytest.raises(SystemExit):
            launcher.fail("broken")
        assert bool(slept) == has_to_wait, rank


def test_an_error_is_said_where_the_disk_takes_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The error is often that the disk is full."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as left:
        launcher.fail("no space left on device", 3)
    assert left.value.code == 3
    assert "error: no space left on device" in capsys.readouterr().err
