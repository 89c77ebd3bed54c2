"""The page and the curves of a comparison of accuracies."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from detr.benchmark.accuracy.report import accuracy_report, write_accuracy_csv
from detr.benchmark.accuracy.row import AccuracyRow, read_accuracy_rows
from detr.benchmark.accuracy.run_curves import (
    RunCurve,
    format_ap_table,
    plot_runs,
    read_row_curves,
    read_run_curve,
    run_labels,
)


def row(name: str, seed: int, ap: float | None, status: str = "ok") -> AccuracyRow:
    return AccuracyRow(name, seed, status, AP=ap, AP50=ap, best_AP=ap, loss=1.0, wall_s=2.0, train_s=1.0)


def report_of(rows: list[AccuracyRow], without_curve: dict[str, str] | None = None) -> str:
    rows = [
        AccuracyRow(**{**vars(each), "environment": environment()}) if each.is_ok and index == 0 else each
        for index, each in enumerate(rows)
    ]
    return accuracy_report(
        rows,
        names=["base", "same", "worse", "absent"],
        seeds=[0, 1, 2],
        base="base",
        notes={"same": "a note"},
        title="Title",
        command="python tools/compare_accuracy.py",
        picture="curves.png",
        without_curve=without_curve or {},
    )


def environment() -> dict[str, object]:
    versions = {"torch": "2", "torchvision": None, "triton": None}
    return {"versions": versions, "gpus": [], "cpu_count": 2, "python": "3", "cuda": None, "driver": None, "git": None}


def test_the_report(tmp_path: Path):
    aps = {"base": (0.5, 0.51, 0.52), "same": (0.505, 0.51, 0.51), "worse": (0.40, 0.41, 0.425)}
    rows = [row(name, seed, ap) for name, values in aps.items() for seed, ap in enumerate(values)]
    report = report_of([*rows, row("absent", 0, None, "failed: a | b")])
    table = [line.split("|") for line in report.splitlines() if line.startswith("| ")]
    cells = {line[1].strip(): line for line in table if len(line) > 5}
    assert cells["base"][3].strip() == "0.5100"
    assert cells["base"][8].strip() == ""
    assert cells["same"][-2].strip() == "a note"
    assert cells["absent"][3].strip() == "not yet run"
    assert {len(line) for line in cells.values()} == {16}
    assert "`same` cannot be told apart from `base`" in report
    assert "`worse` has a lower AP than `base`" in report
    assert "4 degrees of freedom" in report
    assert "2 comparisons at 95% each" in report
    assert "| absent | 0 | failed: a / b |" in report
    assert "![Title](curves.png)" in report
    write_accuracy_csv(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 10


def test_a_report_of_too_little_claims_nothing():
    for rows in ([], [row("base", 0, 0.5), row("same", 0, 0.6)], [row("same", 0, 0.6), row("same", 1, 0.6)]):
        report = report_of(rows)
        assert "Too few runs to compare anything" in report
        assert "told apart" not in report


def test_curves_over_minutes(tmp_path: Path):
    logs = [
        {"step": 5, "train/loss": 3.0, "train/minutes": 2.0},
        {"step": 9, "train/loss": 2.0, "train/minutes": 6.0},
        {"step": 9, "val/AP": 0.25, "train/minutes": 4.0},
        {"step": 12, "val/AP": 0.5, "train/minutes": 6.0, "train/loss": 1.0},
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logs))
    curve = read_run_curve(tmp_path / "run")
    assert [curve.ap_at(minutes) for minutes in (1, 3.9, 5.2, 6)] == [None, (4, 0.25), (6, 0.5), (6, 0.5)]
    # what it was not evaluated near, or had not trained for yet, stays empty
    table = format_ap_table([curve], [1, 3.9, 5.2, 7])
    assert "| run |  | 0.250 | 0.500 (at 6.0) |  | 0.500 | 6.0 | 12 |" in table
    for axis in ("minutes", "step"):
        plot_runs([curve, curve], tmp_path / f"{axis}.png", x=axis, title="Title")
        assert (tmp_path / f"{axis}.png").stat().st_size > 1000
    with pytest.raises(FileNotFoundError, match=r"runs=.*empty: there is no .*metrics\.jsonl"):
        read_run_curve(tmp_path / "empty")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 5, "train/loss": 3.0}\n')
    with pytest.raises(ValueError, match="does not say how long the run had trained"):
        read_run_curve(tmp_path / "run")


GOOD = b'{"step": 5, "train/loss": 3.0, "val/AP": 0.25, "train/minutes": 2.0}\n'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (None, "there is no "),
        (b"", "holds no evaluation"),
        (GOOD[:30], "holds no evaluation"),
        (GOOD + GOOD[:30] + b"\n" + GOOD, "line 2 is not a JSON object"),
        (GOOD + b"\x00\xff\x00\n" + GOOD, "line 2 is not a JSON object"),
        (GOOD.replace(b'"step": 5, ', b"") + GOOD, "line 1 is not a JSON object"),
        (b"[1]\n" + GOOD, "line 1 is not a JSON object"),
        (GOOD.replace(b"3.0", b'"3.0"'), "train/loss of step 5 is '3.0', which is no number"),
        (GOOD.replace(b"0.25", b"[]"), "val/AP of step 5 is [], which is no number"),
        (GOOD.replace(b"2.0", b"null"), "train/minutes of step 5 is None, which is no number"),
        (GOOD.replace(b', "train/minutes": 2.0', b""), "does not say how long the run had trained"),
        ("folder", "there is no "),
    ],
)
def test_a_damaged_log_costs_its_own_curve_alone(tmp_path: Path, log: bytes | str | None, reason: str):
    rows = []
    for seed in range(3):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(GOOD)
        rows.append(AccuracyRow("base", seed, "ok", AP=0.25, folder=str(folder)))
    damaged = tmp_path / "run1" / "metrics.jsonl"
    damaged.unlink()
    if isinstance(log, bytes):
        damaged.write_bytes(log)
    elif log == "folder":
        damaged.mkdir()
    # of another machine, and one that never ran
    rows += [AccuracyRow("base", 3, "ok", folder=str(tmp_path / "elsewhere")), row("base", 4, None, "failed")]
    curves, reasons = read_row_curves(rows)
    assert [curve.label for curve in curves] == ["base 0", "base 2"]
    assert list(reasons) == [str(tmp_path / "run1")]
    assert reason in reasons[str(tmp_path / "run1")]
    plot_runs(curves, tmp_path / "curves.png", x="minutes", title="")
    report = report_of([row("base", 0, 0.5)], reasons)
    assert f"| {tmp_path / 'run1'} | " in report
    assert "run that the picture lacks" not in report_of([row("base", 0, 0.5)])


def test_groups_that_were_evaluated_at_one_step_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def curve(group: str, steps: tuple[int, ...], minutes: tuple[float, ...]) -> RunCurve:
        return RunCurve(group, group, (5, 9), (1.0, 2.0), (3.0, 2.0), steps, minutes, (0.5,) * len(steps))

    shown: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: shown.append(figure))
    once = [curve("a", (9,), (2.0,)), curve("b", (9,), (2.5,)), curve("a", (9,), (2.1,)), curve("c", (), ())]
    plot_runs(once, tmp_path / "once.png", x="step", title="")
    losses, aps = shown.pop().axes
    assert [list(line.get_xdata()) for line in aps.get_lines()] == [[0], [1], [0], []]
    assert [label.get_text() for label in aps.get_xticklabels()] == ["a", "b", "c"]
    assert losses.get_xlabel() == "optimizer step"
    # at different minutes, twice, in one group or never: over the common axis, as the losses
    twice = [curve("a", (5, 9), (1.0, 2.0)), curve("b", (9,), (2.0,))]
    never = [curve("c", (), ()), curve("d", (), ())]
    for curves, x in ((once, "minutes"), (twice, "step"), (once[:1], "step"), (never, "step")):
        plot_runs(curves, tmp_path / "more.png", x=x, title="")
        losses, aps = shown.pop().axes
        xs = [list(one.eval_steps if x == "step" else one.eval_minutes) for one in curves]
        assert [list(line.get_xdata()) for line in aps.get_lines()] == xs
        assert losses.get_xlabel() == "" != aps.get_xlabel()


def test_a_faulty_rows_file_names_its_line(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(row("a", 0, 0.5).to_json() + '\n{"nam": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, is not a row"):
        read_accuracy_rows(tmp_path / "rows.jsonl")
    assert read_accuracy_rows(tmp_path / "absent.jsonl") == []


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert list(run_labels(folders).values()) == ["a/run", "b/run"]
    assert list(run_labels(folders[:1]).values()) == ["run"]
    with pytest.raises(ValueError, match="given twice"):
        run_labels([folders[0], tmp_path / "b" / ".." / "a" / "run"])
