"""Tasks of Hydra's SLURM launcher are ranks; with a stand-in for submitit, which is not a dependency."""

import sys
from types import SimpleNamespace

import pytest

from tools.launcher import submitit_ranks


def job(**values: object) -> SimpleNamespace:
    defaults = {"num_tasks": 16, "global_rank": 9, "local_rank": 1, "job_id": "4711_0", "hostnames": ["a", "b"]}
    return SimpleNamespace(JobEnvironment=lambda: SimpleNamespace(**(defaults | values)))


def test_a_task_is_a_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "submitit", job())
    ranks = submitit_ranks()
    port = int(ranks.pop("MASTER_PORT"))
    assert ranks == {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "a"}
    assert 20000 <= port < 40000
    # every task of a job meets at the same port, two jobs on one machine at two
    monkeypatch.setitem(sys.modules, "submitit", job(global_rank=3, local_rank=3))
    assert submitit_ranks()["MASTER_PORT"] == str(port)
    monkeypatch.setitem(sys.modules, "submitit", job(job_id="4712_0"))
    assert submitit_ranks()["MASTER_PORT"] != str(port)


def test_a_single_task_is_no_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "submitit", job(num_tasks=1, global_rank=0, local_rank=0))
    assert submitit_ranks() == {}
