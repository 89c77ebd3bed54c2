"""Two gloo ranks score what one rank scores, however the images are split."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, Any]:
    """What each rank of one and of two reports."""
    output_dir = tmp_path_factory.mktemp("two_ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for command in ([sys.executable], launch):
        finished = subprocess.run(
            [*command, str(WORKER), str(output_dir)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
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
