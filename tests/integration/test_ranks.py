"""Several ranks do what one does: evaluation, stopping together, batch statistics, too few images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("rank_cases.py")


@pytest.fixture(scope="module")
def report(run_script: Callable[..., Any]) -> dict[str, Any]:
    return json.loads(run_script(WORKER, timeout_s=280).stdout)


@pytest.mark.parametrize("case", ["21 images, batch 1", "21 images, batch 4, fixed pad_to", "3 images on 4 ranks"])
def test_ranks_score_exactly_what_one_scores(report: dict[str, Any], case: str):
    by_world_size = report["evaluations"][case]
    [[one], several] = by_world_size.values()
    assert len(several) == (4 if "4 ranks" in case else 2)
    assert 0.05 < one["AP"] < 0.95
    for metrics in several:
        assert metrics == one


def test_ranks_stop_at_the_same_step_when_one_is_asked(report: dict[str, Any]):
    found = report["preemption"]
    # asked soon after step 4, said in step 5 or, had that begun, in step 6
    assert found["step"] in (5, 6)
    assert len(found["messages"]) == 2
    assert all(f"after step {found['step']}" in message for message in found["messages"])
    assert found["differences"] == []


def test_every_rank_evaluates_with_the_batch_statistics_of_the_checkpoint(report: dict[str, Any]):
    found = report["batch statistics"]
    assert found["names"], "the model of this test has batch statistics"
    assert found["between ranks"] is None
    assert found["to the checkpoint"] is None


def test_too_few_images_for_the_ranks_are_refused_on_each(report: dict[str, Any]):
    assert len(report["few"]) == 4
    assert all("takes 4 images" in message and "has 3" in message for message in report["few"])
