"""tools/compare_accuracy.py and tools/compare_runs.py on a CPU: real runs, a report, and going on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detr.benchmark.accuracy.gradient_report import GradientRow
from detr.engine.checkpoint import Checkpoint
from tools import compare_gradients

Tool = Callable[..., str]


def test_a_comparison_and_its_runs(tool: Tool, refused: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "rows.jsonl",
        "report.md",
        "rows.csv",
        "curves.png",
        "runs",
    }

    # done is done: nothing is started, the report is written anew
    again = tool(*command)
    assert again == report
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 1
    assert "names configurations that are not there" in refused("compare_accuracy", "only=[referense]")

    # the record of a finished run is damaged later on: its row counts, and the page says what the picture lacks
    log = folder / "runs" / "deterministic_seed7" / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:20] + b"\n" + whole)
    (folder / "curves.png").unlink()
    lacking = tool(*command)
    assert f"| {log.parent.relative_to(tmp_path)} | " in lacking
    assert "metrics.jsonl line 1 is not a JSON object" in lacking
    assert lacking == (folder / "report.md").read_text() + "\n"
    assert (folder / "curves.png").stat().st_size > 1000
    log.write_bytes(whole)

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
    # a file that is not there is refused before the first is measured
    refused("compare_gradients", f"checkpoints=[{checkpoint},{tmp_path / 'none.pt'}]", only, "device=cpu", "name=none")
    assert not (tmp_path / "outputs" / "none" / "gradients.json").exists()
    # what was measured before something went wrong is kept
    measure = compare_gradients.compare_at

    def measure_last_alone(found: Checkpoint, path: str, *others: Any) -> list[GradientRow]:
        if path != str(checkpoint):
            raise ValueError("no")
        return measure(found, path, *others)

    monkeypatch.setattr(compare_gradients, "compare_at", measure_last_alone)
    both = f"checkpoints=[{checkpoint},{checkpoint.with_name('step_00000002.pt')}]"
    refused("compare_gradients", both, only, "device=cpu", "name=cut")
    cut = json.loads((tmp_path / "outputs" / "cut" / "gradients.json").read_text())
    assert [row["name"] for row in cut["rows"]][:2] == ["reference_fp32", "triton_fp16"]
    assert "needs checkpoints=[FILE,...]" in refused("compare_gradients")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("compare_accuracy", "only=reference"), "only is a list, as in 'only=[a,b]'; got reference"),
        (("compare_accuracy", "seeds=3"), "seeds is a list, as in 'seeds=[1,2,3]'; got 3"),
        (("compare_accuracy", "train=x"), "train is a list"),
        (("compare_accuracy", "num_parallel=0"), "num_parallel must be a number above 0; got 0"),
        (("compare_accuracy", "minutes=abc"), "minutes must be a number above 0; got abc"),
        (("compare_accuracy", 'train=["seed=3"]'), "each run gets its own seed; leave it out and give seeds="),
        (("compare_accuracy", 'train=["trainer.log_evry=2"]'), "did you mean trainer.log_every? Valid names: "),
        (("compare_accuracy", 'train=["schedule.epochs=x"]'), "schedule.epochs is a whole number, as in"),
        (("compare_accuracy", 'train=["data=cocoo"]'), "Could not find 'data/cocoo'"),
        (("compare_accuracy", 'train=["~data.nothing"]'), "unknown key data.nothing"),
        (("compare_accuracy", 'train=["data.pad_to=64,96"]'), "Ambiguous value for argument 'data.pad_to=64,96'"),
        (("compare_accuracy", 'train=["data.pad_to=[64"]'), "row reference of train would fail: "),
        (("compare_accuracy", 'accuracy.rows.deterministic=["kernel.x=1"]'), "row deterministic of train would fail: "),
        (("compare_runs", "runs=outputs/a"), "runs is a list, as in 'runs=[outputs/a,outputs/b]'; got outputs/a"),
        (("compare_runs", "runs=[a]", "at=5"), "at is a list"),
        (("compare_runs", "runs=[a]", "at=[x]"), "at= is minutes of training"),
        (("compare_runs", "runs=[a]", "at=[-5]"), "at= is minutes of training"),
        (("compare_gradients", "checkpoints=a.pt"), "checkpoints is a list"),
        (("compare_gradients", "checkpoints=[a.pt]", "only=a"), "only is a list"),
        (("compare_gradients", "checkpoints=[a.pt]", "pairs=[[a,b]]"), "pairs= are pairs of rows"),
    ],
)
def test_a_key_of_another_kind_is_refused_before_anything_starts(
    refused: Tool, tmp_path: Path, command: tuple[str, ...], words: str
):
    assert words in refused(*command)
    assert not (tmp_path / "outputs" / command[0] / "runs").exists()


def test_checkpoints_that_one_table_cannot_hold_are_refused(
    tool: Tool, refused: Tool, tmp_path: Path, tiny: tuple[str, ...]
):
    tool("train", *tiny, "name=one")
    tool("train", *tiny, "name=classes", "data.num_classes=2")
    tool("train", *tiny, "name=model", "model.num_queries=7")
    one, classes, model = (tmp_path / "outputs" / name / "last.pt" for name in ("one", "classes", "model"))
    for other, words in (
        (classes, "differs from"),
        (model, "differs from"),
        (one.with_name("best.pt"), "is of step 2, as"),
    ):
        message = refused("compare_gradients", f"checkpoints=[{one},{other}]", "device=cpu", "only=[reference_fp32]")
        assert words in message
        assert str(other) in message
    assert not (tmp_path / "outputs" / "compare_gradients" / "gradients.json").exists()
