"""tools/compare_accuracy.py and tools/compare_runs.py on a CPU: real runs, a report, and going on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[..., str]


def test_a_comparison_and_its_runs(tool: Tool, refused: Tool, tmp_path: Path):
    command = ("compare_accuracy", "only=[deterministic]", "seeds=[7]", 'train=["trainer.log_every=2"]')
    report = tool(*command)
    folder = tmp_path / "outputs" / "compare_accuracy"
    [row] = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert (row["name"], row["seed"], row["status"], row["num_epochs"], row["num_steps"]) == (
        "deterministic",
        7,
        "ok",
        2,
        4,
    )
    assert row["environment"]["versions"]["torch"]
    assert "trainer.log_every=2" in row["overrides"]
    assert "deterministic: true" in (folder / "runs" / "deterministic_seed7" / "config.yaml").read_text()
    assert "| reference | 0 of 1 | not yet run" in report
    assert {path.name for path in folder.iterdir()} == {".lock", "rows.jsonl", "report.md", "rows.csv", "curves.png", "runs"}

    # done is done: nothing is started, the report is written anew
    again = tool(*command)
    assert again == report
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 1
    assert "names configurations that are not there" in refused("compare_accuracy", "only=[referense]")

    table = tool("compare_runs", f"runs=[{folder / 'runs' / 'deterministic_seed7'}]", "at=[0,600]")
    assert "| deterministic_seed7 |  |  | 0.000 |" in table
    assert (tmp_path / "outputs" / "compare_runs" / "runs.png").stat().st_size > 1000
    assert "needs runs=[FOLDER,...]" in refused("compare_runs")

    checkpoint = folder / "runs" / "deterministic_seed7" / "last.pt"
    only = "only=[reference_fp32,triton_fp16]"
    pair = "pairs=[[reference_fp32,reference_fp32]]"
    table = tool("compare_gradients", f"checkpoints=[{checkpoint}]", only, pair, "device=cpu")
    assert "| all parameters | reference_fp32 from reference_fp32 | 0.0e+00 | 1.000000 |" in table
    assert "| all parameters | reference_fp32 |" in table
    assert "| triton_fp16 | 4 | precision=fp16 needs a CUDA device" in table
    found = json.loads((tmp_path / "outputs" / "compare_gradients" / "gradients.json").read_text())
    [plain, absent, _] = found["rows"]
    assert 0 < plain["distances"][0]["error"] < 1e-3
    assert plain["loss"] == pytest.approx(plain["exact_loss"], rel=1e-4)
    assert absent["distances"] == []
    # what was measured before something went wrong is kept
    refused("compare_gradients", f"checkpoints=[{checkpoint},{tmp_path / 'none.pt'}]", only, "device=cpu", "name=cut")
    cut = json.loads((tmp_path / "outputs" / "cut" / "gradients.json").read_text())
    assert [row["name"] for row in cut["rows"]][:2] == ["reference_fp32", "triton_fp16"]
    assert "needs checkpoints=[FILE,...]" in refused("compare_gradients")
