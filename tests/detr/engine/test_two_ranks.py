"""Two gloo ranks take the step that one rank takes with all images, accumulation included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., Any]) -> dict[str, Any]:
    """What each rank of one and of two computed."""
    output_dir = tmp_path_factory.mktemp("two_ranks")
    for ranks in (1, 2):
        run_script(WORKER, str(output_dir), ranks=ranks)
    return {path.stem: torch.load(path, weights_only=True) for path in output_dir.glob("rank*.pt")}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("torch.float64", 1e-9), ("torch.float32", 1e-5), ("averaged torch.float64", 1e-9)]
)
@pytest.mark.parametrize("number", [0, 1])
def test_gradients_equal_those_of_one_rank(reports: dict[str, Any], dtype: str, tolerance: float, number: int):
    one, first, second = (reports[name][f"{dtype}/{number}"] for name in ("rank0_of_1", "rank0_of_2", "rank1_of_2"))
    assert one["gradients"].keys() == first["gradients"].keys()
    largest = max(gradient.abs().max() for gradient in one["gradients"].values())
    for name, gradient in one["gradients"].items():
        assert torch.equal(first["gradients"][name], second["gradients"][name]), name
        error = (first["gradients"][name] - gradient).abs().max() / largest
        assert error < tolerance, f"{name}: {error}"
    torch.testing.assert_close((first["loss"] + second["loss"]) / 2, one["loss"], rtol=tolerance, atol=0)
    torch.testing.assert_close(first["norm"], one["norm"], rtol=tolerance, atol=0)


@pytest.mark.parametrize("what", ["weights", "ema"])
def test_ranks_stay_equal(reports: dict[str, Any], what: str):
    for dtype in ("torch.float64", "torch.float32", "averaged torch.float64"):
        first, second = (reports[name][f"{dtype}/{what}"] for name in ("rank0_of_2", "rank1_of_2"))
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


def test_weights_equal_those_of_one_rank(reports: dict[str, Any]):
    one, two = (reports[name]["torch.float64/weights"] for name in ("rank0_of_1", "rank0_of_2"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-7, msg=name)


def test_averaging_after_the_pass_equals_averaging_within(reports: dict[str, Any]):
    """What captured passes do, against DDP."""
    for what in ("weights", "ema"):
        within, after = (reports["rank0_of_2"][f"{kind}torch.float64/{what}"] for kind in ("", "averaged "))
        for name, tensor in within.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_other_weights_are_not_averaged(reports: dict[str, Any], rank: int):
    """In the order of their memory, nothing would show: it gives numbers, on all ranks the same."""
    found = reports[f"rank{rank}_of_2"]["refusals"]
    assert found["layouts"].startswith("rank 1 differs from rank 0: backbone.")
    assert ", torch.float64 instead of [" in found["layouts"]
    assert found["no gradient"].startswith("1 parameters have no part in the loss of this step (unused)")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("settings", "rank 1 differs from rank 0: optimizer.lr is 1 instead of 0; give the same command on every"),
        ("data", "rank 1 differs from rank 0: data train is 1 images instead of 0 images; give every machine the same"),
        (
            "code",
            "rank 1 differs from rank 0: torch is 2.1 instead of 2.0; install the same code and packages on every",
        ),
        ("checkpoint", "rank 1 differs from rank 0: the step is 8 instead of 7; "),
    ],
)
def test_ranks_that_would_drift_apart_are_all_refused(reports: dict[str, Any], rank: int, what: str, message: str):
    """Each would train on, and rank 0 would save weights that only it has."""
    assert reports[f"rank{rank}_of_2"]["refusals"][what].startswith(message)
