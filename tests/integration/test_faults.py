"""Faults of scripts/prove_faults.sh that need no waiting: what they say, and that they cost at most an interval."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("fault_cases.py")
# the run saves every two steps: at most two are lost, or four where the last checkpoint is the damaged one
FAULTS = {
    "NaN loss at step 7": ("finished", "", 0),
    "full disk": ("exit 1, OSError", "last.pt is as it was. Make room", 3),
    "dead worker": ("exit 1, ChildProcessError", "while it loaded sample", 2),
    "truncated last.pt": ("killed by the signal", "", 4),
}


@pytest.fixture(scope="module")
def outcomes(run_script: Callable[..., Any]) -> dict[str, Any]:
    finished = run_script(WORKER, "--json", *FAULTS, timeout_s=280)
    return json.loads(finished.stdout) | {"stderr": finished.stderr}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_at_most_an_interval(outcomes: dict[str, Any], name: str):
    ending, words, most_lost = FAULTS[name]
    outcome = outcomes[name]
    assert outcome["ending"] == ending
    assert words in outcome["message"]
    assert outcome["num_lost_steps"] <= most_lost
    # the step left out is the one difference that is meant
    assert outcome["same_end"] == (name != "NaN loss at step 7")


def test_the_step_left_out_is_explained(outcomes: dict[str, Any]):
    assert "step 7 is not finite" in outcomes["stderr"]
    assert "The first tensor that is not finite is the loss term loss_bbox" in outcomes["stderr"]
