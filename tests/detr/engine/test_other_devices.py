"""Training where there is no CUDA: on the CPU with torch.cuda out of reach, and on a device nobody wrote code for."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EMULATED = Path(__file__).with_name("emulated_device.py")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# functions of detr that call torch.cuda without a look at the device, and who looks
GUARDED_ELSEWHERE = {
    ("detr/telemetry/timer.py", "span"): "_uses_events",
    ("detr/telemetry/environment.py", "_describe_gpu"): "called for GPUs that were counted",
    **{
        ("detr/engine/cuda_graphs.py", name): "the constructor refuses other devices"
        for name in ("_capture", "_is_short", "_release", "rewind")
    },
    ("detr/distributed.py", "barrier"): "the process group is NCCL's",
    **{
        ("detr/data/page_locks.py", name): "the constructor refuses machines without a GPU"
        for name in ("lock", "unlock", "mark", "wait")
    },
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[list[float]]], Path]:
    """Numbers of two steps on each device, and the folder of a run on the unknown one."""
    folder = tmp_path_factory.mktemp("npu")
    options = ["experiment=debug_cpu", "device=npu", f"output_dir={folder}", "schedule.epochs=1"]
    options += ["data.num_train_images=4", "data.num_val_images=2"]
    run = subprocess.run(
        [sys.executable, str(EMULATED), *options], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[0]), folder


def test_a_step_is_the_same_on_the_cpu_and_on_an_unknown_device(emulated):
    """CUDA is hidden and every function of torch.cuda raises in both."""
    numbers, _ = emulated
    assert len(numbers["cpu"]) == 2
    assert numbers["cpu"][0][0] != numbers["cpu"][1][0]
    assert [skipped for *_, skipped in numbers["npu"]] == [0, 0]
    for given, expected in zip(numbers["npu"], numbers["cpu"], strict=True):
        assert given == pytest.approx(expected, rel=1e-5)


def test_a_run_on_an_unknown_device_trains_evaluates_and_saves(emulated):
    _, folder = emulated
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("val/AP" in line for line in metrics)
    # a machine without the device can read the file
    saved = torch.load(folder / "last.pt", weights_only=True)
    assert {tensor.device.type for tensor in saved["model"].values()} == {"cpu"}


def test_torch_cuda_is_called_behind_a_look_at_the_device(repository):
    """Statically, for what no run on a CPU reaches; the operator's benchmarks are for GPUs alone."""
    unguarded = set()
    benchmark = repository / "detr" / "benchmark"
    for path in (repository / "detr").rglob("*.py"):
        name = path.relative_to(repository).as_posix()
        if path.parent in (benchmark / "ops", benchmark / "findings"):
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _calls_cuda(function) and not _looks_at_device(function):
                unguarded.add((name, function.name))
    assert unguarded == set(GUARDED_ELSEWHERE)


def _calls_cuda(function: ast.FunctionDef) -> bool:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(ast.unparse(call).startswith("torch.cuda.") for call in calls)


def _looks_at_device(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Constant) and side.value == "cuda" for side in (node.left, *node.comparators)
        ):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.is_available":
            return True
    return False


def test_the_check_sees_an_unguarded_call():
    (guarded, unguarded) = ast.parse(
        "def a(d):\n    if d.type == 'cuda':\n        torch.cuda.synchronize(d)\n"
        "def b(d):\n    torch.cuda.synchronize(d)\n"
    ).body
    assert _calls_cuda(guarded)
    assert _looks_at_device(guarded)
    assert _calls_cuda(unguarded)
    assert not _looks_at_device(unguarded)
