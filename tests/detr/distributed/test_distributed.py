"""Ranks, collectives and the launch environment."""

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from detr import distributed

LAUNCH = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_group(no_launcher: None):
    context = distributed.init_distributed("cpu")
    assert context == distributed.DistributedContext(0, 0, 1, torch.device("cpu"))
    assert distributed.is_main()
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    tensor = torch.tensor([3.0], requires_grad=True)
    assert distributed.all_reduce_sum(tensor).equal(torch.tensor([3.0]))
    assert not distributed.all_reduce_mean(tensor).requires_grad
    assert distributed.broadcast_object("value") == "value"
    assert distributed.gather_objects("value") == ["value"]
    distributed.require_same({"key": "value"}, advice="")
    distributed.barrier()
    distributed.cleanup()
    assert not torch.distributed.is_initialized()


def test_a_cluster_address_alone_does_not_mean_torchrun(no_launcher: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    assert distributed.init_distributed("cpu").world_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_PORT": None, "LOCAL_RANK": None}, r"lacks LOCAL_RANK, MASTER_PORT; found .*'RANK': '1'"),
        ({"RANK": "one"}, r"RANK must be an integer >= 0; found .*'RANK': 'one'"),
        ({"MASTER_PORT": "abc"}, r"MASTER_PORT must be an integer >= 0; found .*'MASTER_PORT': 'abc'"),
        ({"RANK": "2"}, r"must be below WORLD_SIZE; found .*'WORLD_SIZE': '2'"),
    ],
)
def test_a_broken_launch_environment_is_shown(
    no_launcher: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], message: str
):
    for name, value in {**LAUNCH, **change}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message + r".*torchrun --nproc_per_node"):
        distributed.init_distributed("cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_meet_say_where_they_looked(no_launcher: None, monkeypatch: pytest.MonkeyPatch, rank: str):
    """A port that another job holds, for rank 0; nobody who listens, for the others."""
    for name, value in {**LAUNCH, "RANK": rank, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if rank == "0":
            other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"rank {rank} of 2 .* 127.0.0.1:{port} .*MASTER_ADDR"):
            distributed.init_distributed("cpu", timeout=timedelta(seconds=2))
    assert not torch.distributed.is_initialized()


def test_devices_that_cannot_be(no_launcher: None):
    with pytest.raises(ValueError, match=r"device=gpu is not a device.*Use auto, cpu, cuda"):
        distributed.init_distributed("gpu")
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(ValueError, match=r"device=cuda needs a CUDA GPU.*device=cpu"),
    ):
        distributed.init_distributed("cuda")


def test_more_processes_than_gpus(no_launcher: None, monkeypatch: pytest.MonkeyPatch):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        with pytest.raises(ValueError, match=r"needs GPU 1 .*1 are visible.*nproc_per_node"):
            distributed.init_distributed("auto")
        with pytest.raises(ValueError, match=r"device=cuda:0 names one GPU for 2 processes"):
            distributed.init_distributed("cuda:0")


def test_auto_takes_the_cpu_where_there_is_no_gpu(no_launcher: None):
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert distributed.init_distributed("auto").device == torch.device("cpu")


def test_collectives_of_two_ranks(tmp_path: Path, run_script: Callable[..., Any]):
    run_script(Path(__file__).with_name("two_ranks.py"), str(tmp_path), ranks=2)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        assert report["context"] == [rank, rank, 2, "cpu"]
        assert report["ranks"] == [rank, 2, rank == 0]
        assert report["sum"] == [3.0, 30.0]
        assert report["mean"] == [1.5, 15.0]
        assert report["input"] == [rank + 1.0, 10.0 * (rank + 1)]
        assert report["broadcast"] == {"from": 0}
        assert report["broadcast from 1"] == 1
        given = zip(*(other["given"] for other in reports), strict=True)
        means = [(torch.tensor(first) / 2 + torch.tensor(second) / 2).tolist() for first, second in given]
        assert report["averaged"] == means
        assert report["averaged strides"] == report["given strides"]
        assert report["broadcast parameter"] == [0, 0]
        assert report["refused"] == (
            "rank 1 differs from rank 0: seed is 2 instead of 1, more is 2 instead of (absent); start them alike"
        )
        assert "key 4 is 1 instead of 0, and 2 more;" in report["refused many"]
    assert reports[0]["gathered"] == ["", "x" * 1000]
    assert reports[1]["gathered"] == []


def test_averaging_copies_along_the_memory(monkeypatch: pytest.MonkeyPatch):
    """Tensors that are not row-major would be copied one by one, both ways."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    copies = []
    copy = torch._foreach_copy_

    def recorded(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copies.append((targets, sources))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", recorded)
    tensors = [
        torch.randn(17),
        torch.randn(5, 7).t(),
        torch.randn(3, 5, 2, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3, 2).permute(2, 0, 1),
        torch.randn(()),
        # with gaps, so it keeps its shape
        torch.randn(4, 6)[:, ::2],
    ]
    before = [tensor.clone() for tensor in tensors]
    try:
        distributed.average_tensors(tensors)
    finally:
        distributed.cleanup()
    [(parts, lines), (lines_again, parts_again)] = copies
    assert [line.dim() for line in lines] == [1, 1, 1, 1, 1, 2]
    assert [line.data_ptr() for line in lines] == [tensor.data_ptr() for tensor in tensors]
    assert [part.shape for part in parts] == [line.shape for line in lines]
    assert all((part.data_ptr() - parts[0].data_ptr()) % 64 == 0 for part in parts)
    assert all(one is again for one, again in zip(lines + parts, lines_again + parts_again, strict=True))
    assert all(tensor.equal(given) for tensor, given in zip(tensors, before, strict=True))


def test_ranks_that_torchrun_starts_again_find_each_other(run_script: Callable[..., Any]):
    # the store still holds where the dead ones listened: without a prefix of each attempt the new ones hang
    run_script(Path(__file__).with_name("restarted_ranks.py"))
