"""Rows in fresh processes: order, failures and what is written."""

import sys
from pathlib import Path

import pytest

from detr.benchmark.matrix import interleaved, run_matrix
from detr.benchmark.step_report import markdown_report, plot_report
from detr.benchmark.step_row import StepRow, write_csv

# stands for tools/benchmark.py: writes a row, dies, or hangs, as its first argument says
ROW_SCRIPT = """
import sys, time
from pathlib import Path
from detr.benchmark.step_row import StepRow
arguments = dict(a.split("=", 1) for a in sys.argv[1:])
if arguments["act"] == "die":
    print("noise", file=sys.stderr)
    print("error: kernel=cuda was asked for, but no GPU is visible", file=sys.stderr)
    raise SystemExit(1)
if arguments["act"] == "hang":
    time.sleep(60)
row = StepRow(arguments["row"], int(arguments["repeat"]), "ok", images_per_s=float(arguments["speed"]), step_ms=10.0,
              msda_share=0.25, phases_ms={"forward": 4.0}, kernel="cuda", accumulator="float32", batch_size=2,
              environment={"versions": {"torch": "2", "torchvision": None, "triton": None}, "gpus": [],
                           "cpu_count": 2, "python": "3", "cuda": None, "driver": None, "git": None})
Path(arguments["result"]).write_text(row.to_json())
"""


def measure(tmp_path: Path, rows, **options) -> list[StepRow]:
    script = tmp_path / "row.py"
    script.write_text(ROW_SCRIPT)
    options = {"shared": [], "repeats": 1, "rows_file": tmp_path / "rows.jsonl"} | options
    return run_matrix([sys.executable, str(script)], rows, **options)


def test_repeats_run_forwards_and_backwards():
    assert list(interleaved("AB", 3)) == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2)]


def test_a_failed_row_keeps_its_reason_and_the_rest_go_on(tmp_path):
    rows = measure(
        tmp_path,
        {"good": ["act=run", "speed=8"], "bad": ["act=die"], "stuck": ["act=hang"], "last": ["act=run", "speed=4"]},
        timeout_s=20,
    )
    assert [row.name for row in rows] == ["good", "bad", "stuck", "last"]
    assert [row.status for row in rows] == [
        "ok",
        "failed: kernel=cuda was asked for, but no GPU is visible",
        "failed: took more than 20 s",
        "ok",
    ]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [StepRow.from_json(line) for line in lines] == rows


def test_report(tmp_path):
    rows = measure(
        tmp_path, {"base": ["act=run", "speed=8"], "fast": ["act=run", "speed=20"], "bad": ["act=die"]}, repeats=2
    )
    report = markdown_report(rows, title="Title", command="python tools/benchmark.py", baseline="base")
    cells = {
        line.split(" | ")[0].strip("| "): line.split(" | ") for line in report.splitlines() if line.startswith("|")
    }
    header = cells["row"]
    assert cells["fast"][header.index("images/s")] == "20.00"
    assert cells["fast"][header.index("x base")] == "2.50"
    assert cells["base"][header.index("MSDA share")] == "25%"
    assert "no GPU is visible" in " ".join(cells["bad"])
    write_csv(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + 6
    plot_report(rows, tmp_path / "report.png", title="Title")
    assert (tmp_path / "report.png").stat().st_size > 1000


@pytest.mark.parametrize("override", ["kernel=auto", "kernel.backend=auto"])
def test_auto_is_refused(tmp_path, override):
    with pytest.raises(ValueError, match="row a asks for kernel=auto; name the backend"):
        measure(tmp_path, {"a": [override]})


def test_no_rows(tmp_path):
    with pytest.raises(ValueError, match="got 0 rows"):
        measure(tmp_path, {})
