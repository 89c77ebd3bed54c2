"""Rows in fresh processes: order, failures and what is written."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from detr.benchmark.steps.matrix import interleaved, row_command, run_matrix
from detr.benchmark.steps.report import kernel_report, markdown_report, plot_report
from detr.benchmark.steps.row import StepRow, read_rows, write_csv

# stands for tools/benchmark.py: writes a row, dies, or hangs, as its first argument says
ROW_SCRIPT = """
import subprocess, sys, time
from pathlib import Path
from detr.benchmark.steps.row import StepRow
arguments = dict(a.split("=", 1) for a in sys.argv[1:])
if arguments["act"] == "die":
    print("noise", file=sys.stderr)
    print("error: kernel=cuda was asked for, but no GPU is visible", file=sys.stderr)
    raise SystemExit(1)
if arguments["act"] == "hang":
    # a child, such as a data worker, that must end with its row
    child = f"import time\\nwhile True: time.sleep(0.05); open({arguments['grow']!r}, 'a').write('x')"
    subprocess.Popen([sys.executable, "-c", child])
    time.sleep(60)
if arguments["act"] == "crash":
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
row = StepRow(arguments["row"], int(arguments["repeat"]), "ok", images_per_s=float(arguments["speed"]), step_ms=10.0,
              msda_share=0.25, phases_ms={"forward": 4.0}, kernel="cuda", accumulator="float32",
              batch_size=int(arguments.get("batch", 2)), num_gpus=int(arguments.get("gpus", 1)),
              precision=arguments.get("precision"),
              top_kernels_ms={"gemm<a || b>": 2.5}, num_kernels=12, kernel_ms=7.5, num_graphs=9,
              num_recompiles=int(arguments.get("recompiles", 0)), spent_s={"build": 0.01},
              environment={"versions": {"torch": "2", "torchvision": None, "triton": None}, "gpus": [],
                           "cpu_count": 2, "python": "3", "cuda": None, "driver": None, "git": None})
Path(arguments["result"]).write_text(row.to_json())
"""


def measure(tmp_path: Path, rows, **options) -> list[StepRow]:
    script = tmp_path / "row.py"
    script.write_text(ROW_SCRIPT)
    options = {"shared": [], "repeats": 1, "rows_file": tmp_path / "rows.jsonl", "num_gpus": 1} | options
    return run_matrix(script, rows, **options)


def table(report: str, title: str) -> dict[str, dict[str, str]]:
    """A table of a report: cells by row and column."""
    lines = report.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_repeats_run_forwards_and_backwards():
    assert list(interleaved("AB", 3)) == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2)]


def test_a_failed_row_keeps_its_reason_and_the_rest_go_on(tmp_path):
    rows = measure(
        tmp_path,
        {
            "good": ["act=run", "speed=8"],
            "bad": ["act=die"],
            "full": ["act=crash"],
            "large": ["act=run", "speed=2", "gpus=2"],
            "last": ["act=run", "speed=4"],
        },
    )
    assert [(row.name, row.status) for row in rows] == [
        ("good", "ok"),
        ("bad", "failed: kernel=cuda was asked for, but no GPU is visible"),
        ("full", "failed: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"),
        ("large", "not run: gpus=2, and this machine has 1"),
        ("last", "ok"),
    ]
    assert rows[0].spent_s["start"] > 0
    assert read_rows(tmp_path / "rows.jsonl") == rows
    report = markdown_report(rows, title="Title", command="command", baselines=["good"], picture="x.png")
    assert table(report, "Rows without numbers")["large"]["reason"] == "not run: gpus=2, and this machine has 1"


def test_a_row_that_hangs_ends_with_its_children(tmp_path):
    grown = tmp_path / "grown"
    [row] = measure(tmp_path, {"stuck": ["act=hang", f"grow={grown}"]}, row_timeout_s=3)
    assert row.status == "failed: took more than 3 s"
    size = grown.stat().st_size if grown.exists() else 0
    time.sleep(0.5)
    assert (grown.stat().st_size if grown.exists() else 0) == size


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_matrix_that_is_ended_ends_its_row(tmp_path, gpus):
    """Under torchrun too, whose ranks have sessions of their own."""
    grown, script = tmp_path / "grown", tmp_path / "row.py"
    script.write_text(ROW_SCRIPT)
    program = (
        "from pathlib import Path; from detr.benchmark.steps.matrix import run_matrix\n"
        f"run_matrix(Path({str(script)!r}), {{'stuck': ['act=hang', 'gpus={gpus}', 'grow={grown}']}}, "
        f"shared=[], repeats=1, rows_file=Path({str(tmp_path / 'rows.jsonl')!r}), num_gpus={gpus})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not grown.exists():
        assert time.monotonic() < deadline, "the row did not start"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    size = grown.stat().st_size
    time.sleep(0.5)
    assert grown.stat().st_size == size


def test_rows_that_would_end_too_late_are_not_started(tmp_path):
    rows = measure(tmp_path, {"a": ["act=run", "speed=8"], "b": ["act=run", "speed=8"]}, time_limit_s=0.01)
    assert [row.status for row in rows] == ["ok", "not run: time_limit_s=0 left no time for it"]


def test_several_gpus_are_torchruns(tmp_path):
    script = tmp_path / "row.py"
    assert row_command(script, ["a=1", "gpus=1"])[1:] == [str(script), "a=1", "gpus=1"]
    command = row_command(script, ["gpus=1", "gpus=4"])
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]


def test_report(tmp_path):
    rows = measure(
        tmp_path,
        {
            "base": ["act=run", "speed=8"],
            "fast": ["act=run", "speed=20", "recompiles=3", "precision=bf16"],
            "other_batch": ["act=run", "speed=4", "batch=1"],
            "bad": ["act=die"],
        },
        repeats=2,
    )
    rows.append(StepRow("recorded_peer", 0, "recorded", model="peer", batch_size=2, images_per_s=5.0))
    rows.append(StepRow("two", 0, "ok", **{"num_gpus": 2, "images_per_s": 15.2} | same_as(rows[0])))
    report = markdown_report(
        rows,
        title="Title",
        command="python tools/benchmark.py",
        baselines=["base", "recorded_peer", "absent"],
        picture="report.png",
    )
    assert "![Title](report.png)" in report
    speeds, times = table(report, "Throughput"), table(report, "Where the time goes")
    assert speeds["fast"]["images/s"] == "20.00"
    assert (speeds["fast"]["x base"], speeds["fast"]["x recorded_peer"]) == ("2.50", "4.00")
    assert "x absent" not in speeds["fast"]
    assert speeds["other_batch"]["x base"] == ""
    assert speeds["recorded_peer"]["parity"] == "recorded"
    assert (speeds["two"]["scaling"], speeds["base"]["scaling"]) == ("1.90x (95%)", "")
    assert times["base"]["MSDA share"] == "25%"
    assert times["base"]["graphs"] == "9"
    assert times["fast"]["graphs"] == "9, **3 while timed**"
    assert "recorded_peer" not in times
    assert "no GPU is visible" in table(report, "Rows without numbers")["bad"]["reason"]
    assert "| `gemm<a \\|\\| b>` | 2.500 |" in kernel_report(rows)
    write_csv(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + 10
    plot_report(rows, tmp_path / "report.png", title="Title")
    assert (tmp_path / "report.png").stat().st_size > 1000


def same_as(row: StepRow) -> dict[str, object]:
    """What makes a row on several GPUs comparable with `row`."""
    return {name: getattr(row, name) for name in ("kernel", "accumulator", "batch_size", "environment", "date")}


def test_a_faulty_rows_file_names_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(StepRow("a", 0, "ok").to_json() + '\n{"nam": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2, is not a row"):
        read_rows(file)


@pytest.mark.parametrize("override", ["kernel=auto", "kernel.backend=auto"])
def test_auto_is_refused(tmp_path, override):
    with pytest.raises(ValueError, match="row a asks for kernel=auto; name the backend"):
        measure(tmp_path, {"a": [override]})


def test_no_rows(tmp_path):
    with pytest.raises(ValueError, match="got 0 rows"):
        measure(tmp_path, {})
