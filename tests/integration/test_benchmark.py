"""tools/benchmark.py on a CPU: one row in this process, and a preset with its reports."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from detr.benchmark.steps.row import StepRow, read_rows

Tool = Callable[..., str]


@pytest.fixture(scope="module")
def smoke(repository: Path) -> list[str]:
    """What the smoke preset sets, smaller still."""
    preset = yaml.safe_load((repository / "configs" / "benchmark" / "smoke.yaml").read_text())
    return [*preset["shared"], "num_steps=1", "height=64", "width=64"]


def measure(tool: Tool, tmp_path: Path, *overrides: str) -> StepRow:
    result = tmp_path / "row.json"
    tool("benchmark", "row=name", f"result={result}", *overrides)
    return StepRow.from_json(result.read_text())


def test_a_row_on_files(tool: Tool, smoke: list[str], tmp_path: Path):
    from detr.benchmark.steps.data import write_jpeg_dataset

    write_jpeg_dataset(tmp_path / "jpegs", [(96, 96)] * 4)
    files = [f"data.root={tmp_path / 'jpegs'}", "transforms=flip_only", "transforms.eval.size=64", "data.pad_to=64"]
    for source in ("cached", "loader"):
        row = measure(tool, tmp_path, *smoke, *files, f"data_source={source}", "data.num_workers=0")
        assert (row.name, row.status, row.data_source, row.height) == ("name", "ok", source, None)
        assert row.padded_mpx == 64 * 64 / 1e6
        assert row.images_per_s is not None
        assert row.num_workers == (0 if source == "loader" else None)
    assert row.environment["versions"]["torch"]
    assert row.spent_s.keys() == {"build", "warmup", "steps", "profile"}


def test_all_rows_of_the_data_preset_have_one_padded_size(
    tool: Tool, smoke: list[str], repository: Path, tmp_path: Path
):
    """Else they would compare sizes, and compile for minutes, instead of comparing where batches come from."""
    from detr.benchmark.steps.data import write_jpeg_dataset

    preset = yaml.safe_load((repository / "configs" / "benchmark" / "data.yaml").read_text())
    shared = dict(text.split("=", 1) for text in preset["shared"])
    assert shared["transforms"] == "fixed"
    assert shared["transforms.eval.size"] == f"[{shared['height']},{shared['width']}]"
    write_jpeg_dataset(tmp_path / "jpegs", [(96, 128)] * 8)
    files = [f"data.root={tmp_path / 'jpegs'}", "transforms=fixed", "transforms.eval.size=[64,96]", "width=96"]
    for name in ("synthetic", "cached", "loader_4_workers"):
        row = measure(tool, tmp_path, *smoke, *files, *preset["rows"][name])
        assert row.padded_mpx == 64 * 96 / 1e6
        assert row.num_workers == (4 if name == "loader_4_workers" else None)


def test_one_batch_size_a_row(refused: Tool, smoke: list[str], tmp_path: Path):
    message = refused(
        "benchmark", "row=x", f"result={tmp_path / 'x'}", *smoke, "data_source=cached", "data.batch_size=5"
    )
    assert "batch_size=2, but data.batch_size=5" in message


def test_the_noise_seed_changes_nothing_but_the_noise(tool: Tool, smoke: list[str], tmp_path: Path):
    common = [*smoke, "measure=losses", "num_steps=2"]
    losses = [
        measure(tool, tmp_path, *common, f"model.dropout={dropout}", f"noise_seed={seed}").losses
        for dropout, seed in ((0.1, 0), (0.1, 1), (0.0, 0), (0.0, 1))
    ]
    assert losses[0] != losses[1]
    # the same weights and batches: without dropout nothing is left to differ
    assert losses[2] == losses[3]


def test_a_preset_with_its_reports(tool: Tool, refused: Tool, tmp_path: Path):
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(StepRow("earlier", 0, "ok", batch_size=2, images_per_s=1.0).to_json() + "\n")
    output = tool(
        "benchmark",
        "only=[reference]",
        "benchmark.repeats=1",
        "gpus=2",
        f"extra_rows=[{earlier}]",
        "benchmark.baselines=[earlier]",
        "logger=tensorboard",
    )
    folder = tmp_path / "outputs" / "benchmark"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "kernels.md",
        "report.md",
        "report.png",
        "rows.csv",
        "rows.jsonl",
        "tensorboard",
    }
    [row] = read_rows(folder / "rows.jsonl")
    assert (row.name, row.status, row.kernel, row.model) == ("reference", "ok", "reference", "tiny")
    # two ranks under torchrun, each with its batch
    assert (row.num_gpus, row.batch_size) == (2, 2)
    assert row.images_per_s == pytest.approx(2 * 2 / row.step_ms * 1e3)
    assert "x earlier" in output
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["benchmark/report/report"]
    [table] = events.Tensors("benchmark/rows/text_summary")
    lines = table.tensor_proto.string_val[0].decode().splitlines()
    # the row measured here, and the one of the other file
    assert [line.split(" | ")[0] for line in lines] == ["| name", "| ---", "| reference", "| earlier"]
    assert f"| {row.step_ms:.6g} |" in lines[2]
    assert "only=['referense'] names rows that are not there" in refused("benchmark", "only=[referense]")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # the command line's data have the key, those of the row do not
        (("data=synthetic", "data.num_train_images=8", '+benchmark.rows.bad=["data=coco"]'), "row bad of benchmark"),
        (('+benchmark.rows.bad=["modl=refine"]',), "unknown key modl; did you mean model?"),
        (('benchmark.shared=["model=nothing"]',), "Could not find 'model/nothing'"),
        (("batch_sise=3",), "unknown key batch_sise; did you mean batch_size?"),
    ],
)
def test_a_row_that_would_fail_at_its_start_is_refused_before_the_first(
    refused: Tool, tmp_path: Path, overrides: tuple[str, ...], words: str
):
    assert words in refused("benchmark", *overrides)
    assert not (tmp_path / "outputs" / "benchmark" / "rows.jsonl").exists()
