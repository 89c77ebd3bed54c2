"""Two gloo ranks score what one rank scores, however the images are split."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., Any]) -> dict[str, Any]:
    """What each rank of one and of two reports."""
    output_dir = tmp_path_factory.mktemp("two_ranks")
    for ranks in (1, 2):
        run_script(WORKER, str(output_dir), ranks=ranks)
    return {path.stem: json.loads(path.read_text()) for path in output_dir.iterdir()}


@pytest.mark.parametrize("split", ["unpadded", "padded", "one rank has all"])
def test_two_ranks_equal_one(reports: dict[str, Any], split: str):
    one = reports["rank0_of_1"][split]
    first, second = reports["rank0_of_2"][split], reports["rank1_of_2"][split]
    assert first["images"] == one["images"] == 21
    assert first["detections"] == one["detections"]
    assert 0.05 < one["metrics"]["AP"] < 0.95
    assert first["metrics"] == second["metrics"] == one["metrics"]
    # detections are gathered to rank 0 only
    assert second["detections"] == 0


def test_ranks_without_any_image_do_not_hang(reports: dict[str, Any]):
    for rank in ("rank0_of_1", "rank0_of_2", "rank1_of_2"):
        report = reports[rank]["nobody has any"]
        assert report["images"] == 0
        assert report["metrics"]["AP"] == 0.0
