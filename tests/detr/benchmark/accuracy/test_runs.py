"""Sittings of a comparison of accuracies: what runs, what is skipped, what a kill leaves."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from detr.benchmark.accuracy.row import read_accuracy_rows
from detr.benchmark.accuracy.runs import RunSpec, gpus_to_share, plan_runs, run_sitting
from detr.benchmark.folder_lock import locked_folder
from detr.benchmark.processes import failure_reason

# stands for tools/train.py: trains, dies, or sleeps until it is asked to stop, as `act` says
RUN_SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
arguments = dict(a.split("=", 1) for a in sys.argv[1:])
folder = Path(arguments["output_dir"].strip("'").replace("\\\\'", "'"))
folder.mkdir(exist_ok=True)
with (folder.parent / "starts").open("a") as file:
    file.write(f"{arguments['name']} {time.monotonic()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
if arguments["act"] == "die":
    print("error: kernel=cuda was asked for, but no GPU is visible")
    raise SystemExit(1)
if arguments["act"] == "silent":
    raise SystemExit(0)
if arguments["act"] == "stop" and not (folder / "saved").exists():
    def stop(*_):
        (folder / "saved").touch()
        raise SystemExit(75)
    signal.signal(signal.SIGTERM, stop)
    (folder / "ready").touch()
    time.sleep(60)
time.sleep(float(arguments.get("sleep", 0)))
seed = int(arguments["seed"])
ap = float(arguments["ap"]) + seed / 100
logs = [
    {"step": 10, "train/loss": 9.0, "train/skipped": 0.2, "train/images_per_s": 1.0, "train/minutes": 0.5, "epoch": 1},
    {"step": 10, "val/AP": ap + 0.2, "val/AP50": 0.9, "val/AP75": 0.5, "train/minutes": 0.5, "epoch": 1},
    {"step": 20, "train/loss": 5.0, "train/skipped": 0.1, "train/images_per_s": 8.0, "train/minutes": 1.0, "epoch": 2},
    {"step": 20, "val/AP": ap, "val/AP50": 0.8, "val/AP75": 0.4, "train/minutes": 1.0, "epoch": 2},
]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in logs))
git = {"commit": "0123456789abcdef", "dirty": False}
environment = {"versions": {"torch": "2", "torchvision": None, "triton": None}, "gpus": [], "cpu_count": 2,
               "python": "3", "cuda": None, "driver": None, "git": git}
(folder / "environment.json").write_text(json.dumps(environment))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(RUN_SCRIPT)
    return path


def specs_of(rows: dict[str, list[str]], seeds: list[int]) -> list[RunSpec]:
    return plan_runs(rows, seeds, ["kernel=reference"])


def starts(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "runs" / "starts").read_text().splitlines()]


def test_runs_come_seed_by_seed_and_name_their_kernel():
    specs = plan_runs({"a": ["kernel=cuda"], "b": []}, [3, 4], ["kernel=triton", "x=1"])
    assert [(spec.name, spec.seed) for spec in specs] == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]
    assert specs[0].overrides == ("kernel=triton", "x=1", "kernel=cuda")
    for rows, shared in (({"a": []}, []), ({"a": ["kernel=auto"]}, ["kernel=cuda"]), ({"a": []}, ["kernel=auto"])):
        with pytest.raises(ValueError, match="row a does not name its kernel"):
            plan_runs(rows, [0], shared)
    for rows, seeds in (({}, [0]), ({"a": ["kernel=cuda"]}, []), ({"a": ["kernel=cuda"]}, [1, 1])):
        with pytest.raises(ValueError, match="needs rows and different seeds"):
            plan_runs(rows, seeds, [])


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "a=b", "a,b", "", "-a", "a|b"])
def test_a_name_that_cannot_be_a_folder_of_runs_is_refused(name: str):
    with pytest.raises(ValueError, match="names folders of runs; use letters"):
        plan_runs({name: ["kernel=cuda"]}, [0], [])


@pytest.mark.parametrize("text", ["seed=3", "+seed=3", "output_dir=x", "name=x"])
def test_what_each_run_gets_of_its_own_is_refused(text: str):
    with pytest.raises(ValueError, match="each run gets its own"):
        plan_runs({"a": ["kernel=cuda"]}, [0], [text])
    with pytest.raises(ValueError, match="each run gets its own"):
        plan_runs({"a": ["kernel=cuda", text]}, [0], [])


@pytest.mark.parametrize("seed", ["a", 1.5, True, None])
def test_seeds_are_whole_numbers(seed: object):
    with pytest.raises(ValueError, match="seeds are whole numbers"):
        plan_runs({"a": ["kernel=cuda"]}, [0, seed], [])  # type: ignore[list-item]


@pytest.mark.parametrize("limits", [{"num_parallel": 0}, {"num_parallel": -1}, {"minutes": "abc"}, {"minutes": 0}])
def test_a_sitting_that_could_start_nothing_is_refused(script: Path, tmp_path: Path, limits: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be a number above 0"):
        run_sitting(script, specs_of({"a": ["act=run", "ap=0"]}, [0]), folder=tmp_path / "out", **limits)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_held_by_a_comparison_and_by_runs_that_outlive_it(script: Path, tmp_path: Path):
    specs = specs_of({"a": ["act=run", "ap=0.5"]}, [0])
    with locked_folder(tmp_path) as lock:
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
        with pytest.raises(ValueError, match="in use by another comparison"):
            run_sitting(script, specs, folder=tmp_path)
    with pytest.raises(ValueError, match="in use by another comparison"):
        run_sitting(script, specs, folder=tmp_path)
    assert not (tmp_path / "runs").exists()
    orphan.communicate(b"\n")
    assert [row.AP for row in run_sitting(script, specs, folder=tmp_path)] == [0.5]


def test_a_run_inherits_the_hold_on_the_folder(script: Path, tmp_path: Path):
    look = "import os; print([f for f in os.listdir('/proc/self/fd') if os.path.realpath(f'/proc/self/fd/{f}')"
    script.write_text(f"{look}.endswith('.lock')])\n")
    run_sitting(script, specs_of({"a": []}, [0]), folder=tmp_path)
    assert (tmp_path / "runs" / "a_seed0.log").read_text().strip() != "[]"


def test_a_row_that_a_kill_cut_off_is_made_anew_and_no_other_is_lost(script: Path, tmp_path: Path):
    specs = specs_of({"a": ["act=run", "ap=0.5"], "b": ["act=run", "ap=0.6"]}, [0])
    run_sitting(script, specs, folder=tmp_path)
    rows = tmp_path / "rows.jsonl"
    whole = rows.read_text()
    rows.write_text(whole[:-40])
    assert [row.name for row in read_accuracy_rows(rows)] == ["a"]
    assert [row.AP for row in run_sitting(script, specs, folder=tmp_path)] == [0.5, 0.6]
    assert [row.name for row in read_accuracy_rows(rows)] == ["a", "b"]
    # all but its end
    rows.write_text(whole[:-1])
    assert [row.AP for row in run_sitting(script, specs, folder=tmp_path)] == [0.5, 0.6]
    assert starts(tmp_path) == ["a_seed0", "b_seed0", "b_seed0"]


@pytest.mark.parametrize("damage", [b"{", b"3", b"[1]", b"null", b'{"name": "a"}', b"\xff\xfe"])
def test_a_damaged_row_is_named_with_what_to_do(tmp_path: Path, damage: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(damage + b"\n")
    with pytest.raises(ValueError, match=r"line 1, is not a row .* remove that line"):
        read_accuracy_rows(path)


def test_a_run_without_numbers_does_not_end_the_others(script: Path, tmp_path: Path):
    rows = {"silent": ["act=silent"], "good": ["act=run", "ap=0.5"]}
    silent, good = run_sitting(script, specs_of(rows, [0]), folder=tmp_path)
    assert silent.status.startswith("failed: ")
    assert "metrics.jsonl" in silent.status
    assert good.AP == 0.5


def test_the_reason_of_a_failure_has_all_its_lines():
    said = "warning\nerror: a different run. It differs in:\n  data.size: 1 -> 2\nGive another name=\n"
    reason = failure_reason(said + "(HYDRA_FULL_ERROR=1 shows the stack trace)\nmore\n")
    assert reason == "a different run. It differs in: data.size: 1 -> 2 Give another name="
    assert failure_reason("error: one\nmore\n") == "one"


def test_a_second_sitting_goes_on_where_the_first_ended(script: Path, tmp_path: Path):
    rows = {"good": ["act=run", "ap=0.5"], "bad": ["act=die", "ap=0"]}
    first = run_sitting(script, specs_of(rows, [0]), folder=tmp_path / "out", num_parallel=2)
    assert [(row.name, row.status) for row in first] == [
        ("good", "ok"),
        ("bad", "failed: kernel=cuda was asked for, but no GPU is visible (exit code 1)"),
    ]
    good = first[0]
    # the last evaluation counts; the best one was chosen on the same images
    assert (good.AP, good.best_AP, good.best_epoch, good.AP50) == (0.5, 0.7, 1, 0.8)
    assert (good.num_steps, good.num_skipped, good.loss, good.images_per_s, good.train_s) == (20, 3, 5.0, 8.0, 60.0)
    assert (good.commit, good.seed) == ("0123456789ab", 0)

    second = run_sitting(script, specs_of(rows, [0, 1]), folder=tmp_path / "out")
    assert sorted(starts(tmp_path / "out")) == ["bad_seed0", "bad_seed1", "good_seed0", "good_seed1"]
    assert [(row.name, row.seed) for row in second] == [("good", 0), ("bad", 0), ("good", 1), ("bad", 1)]
    assert second[0] == good
    assert len(read_accuracy_rows(tmp_path / "out" / "rows.jsonl")) == 4
    # other keys are another run
    changed = specs_of({"good": ["act=run", "ap=0.1"]}, [0])
    assert [row.AP for row in run_sitting(script, changed, folder=tmp_path / "out")] == [0.1]
    failed = specs_of({"bad": rows["bad"]}, [0])
    run_sitting(script, failed, folder=tmp_path / "out", retry_failed=True)
    assert starts(tmp_path / "out").count("bad_seed0") == 2


def test_gpus_are_shared_evenly(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_to_share(1) == [None]
    assert gpus_to_share(2) == ["0", "1"]
    rows = {name: ["act=run", "ap=0.5", "sleep=0.6"] for name in "abcd"}
    run_sitting(script, specs_of(rows, [0]), folder=tmp_path, num_parallel=2, gpus=gpus_to_share(2))
    lines = [line.split() for line in (tmp_path / "runs" / "starts").read_text().splitlines()]
    assert sorted(line[2] for line in lines) == ["0", "0", "1", "1"]
    times = sorted(float(line[1]) for line in lines)
    assert times[3] - times[0] < 0.6
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    assert gpus_to_share(2) == ["5", "3"]
    for num_gpus, words in ((0, "at least 1"), (3, "names 2; lower gpus")):
        with pytest.raises(ValueError, match=words):
            gpus_to_share(num_gpus)


def test_several_run_at_once(script: Path, tmp_path: Path):
    rows = {name: ["act=run", "ap=0.5", "sleep=0.6"] for name in "abcd"}
    run_sitting(script, specs_of(rows, [0]), folder=tmp_path, num_parallel=2)
    times = [float(line.split()[1]) for line in (tmp_path / "runs" / "starts").read_text().splitlines()]
    assert times[1] - times[0] < 0.5
    assert times[2] - times[0] > 0.55


def test_what_would_end_too_late_is_not_started_and_what_runs_is_saved(script: Path, tmp_path: Path):
    rows = {"cut": ["act=stop", "ap=0.5"], "later": ["act=run", "ap=0.5"]}
    started_s = time.monotonic()
    # the first is expected to take no time at all, so it starts; it takes longer
    found = run_sitting(script, specs_of(rows, [0]), folder=tmp_path, minutes=1.5 / 60, expected_s=0.0)
    assert time.monotonic() - started_s < 15
    assert found == []
    assert (tmp_path / "runs" / "cut_seed0" / "saved").exists()
    assert starts(tmp_path) == ["cut_seed0"]
    assert run_sitting(script, specs_of(rows, [0]), folder=tmp_path, minutes=1, expected_s=600.0) == []
    rest = run_sitting(script, specs_of(rows, [0]), folder=tmp_path)
    assert [(row.name, row.status) for row in rest] == [("cut", "ok"), ("later", "ok")]


def test_a_sitting_that_is_stopped_lets_its_runs_save(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        # the run has set its signal handler by then
        if (tmp_path / "runs" / "cut_seed0" / "ready").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("detr.benchmark.accuracy.runs._stop_if_late", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_sitting(script, specs_of({"cut": ["act=stop", "ap=0.5"]}, [0]), folder=tmp_path)
    assert (tmp_path / "runs" / "cut_seed0" / "saved").exists()


def test_a_run_that_takes_too_long_is_a_row(script: Path, tmp_path: Path):
    [row] = run_sitting(script, specs_of({"slow": ["act=stop", "ap=0.5"]}, [0]), folder=tmp_path, timeout_s=1.5)
    assert row.status.startswith("failed: ended after ")
