"""Run by test_distributed: two ranks that die and are started again, with torchrun's store outliving them."""

import multiprocessing
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from detr.distributed import all_reduce_sum, cleanup, init_distributed

TIMEOUT = timedelta(seconds=20)


def rank_main(rank: int, attempt: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )
    init_distributed("cpu", timeout=TIMEOUT)
    assert all_reduce_sum(torch.ones(())) == 2
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    cleanup()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    for attempt, exit_code in ((0, -signal.SIGKILL), (1, 0)):
        ranks = [fork.Process(target=rank_main, args=(rank, attempt, store.port)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT.total_seconds())
            found = process.exitcode
            process.kill()
            assert found == exit_code, f"attempt {attempt} ended with {found}"


if __name__ == "__main__":
    main()
