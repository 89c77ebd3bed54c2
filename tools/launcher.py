"""What every tool shares: Hydra from any working directory, and errors a user can act on."""

import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from detr.distributed import DistributedContext, broadcast_object, cleanup, init_distributed, is_main
from detr.engine.preemption import REQUEUE_EXIT_CODE, Preempted
from detr.engine.random_state import seed_everything
from detr.rank_logging import log_as_rank
from detr.telemetry.environment import collect_environment, format_environment
from ops import BackendUnavailable
from tools.help_text import help_text
from tools.override_checks import CONFIG_DIR, check_overrides, require_keys

T = TypeVar("T")

_log = logging.getLogger(__name__)

# mistakes of the user, whose text says what to do; anything else is ours and keeps its stack trace
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError, MemoryError, BackendUnavailable)

# ranks start seconds apart where a machine is busy
SECONDS_FOR_FIRST_RANK = 10.0


def hydra_tool(
    config_name: str, *, error_code: int = 1
) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` a command that composes `configs/<config_name>.yaml`; `--help` prints the text of its file.

    Unknown keys are refused with the names that exist, user errors are printed without a stack trace
    (HYDRA_FULL_ERROR=1 shows it) and exit with `error_code`, a run that a signal stopped exits with 75 ("try again"),
    and the process group is closed whatever happens.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def task(cfg: DictConfig) -> None:
            try:
                main(cfg)
            except (*USER_ERRORS, InstantiationException) as error:
                text = user_message(error)
                if text is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                fail(text, error_code)
            except Preempted as stop:
                print(stop, file=sys.stderr, flush=True)
                raise SystemExit(REQUEUE_EXIT_CODE) from None
            except KeyboardInterrupt:
                print("interrupted; the last checkpoint is whole", file=sys.stderr, flush=True)
                raise SystemExit(130) from None
            finally:
                cleanup()

        def entry() -> None:
            if {"--help", "-h"} & set(sys.argv[1:]):
                print(help_text(str(main.__globals__["__doc__"]), config_name, str(CONFIG_DIR)), end="")
                return
            try:
                require_keys(sys.argv[1:])
                check_overrides(config_name, sys.argv[1:])
            except ValueError as error:
                fail(str(error), error_code)
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(task)()

        return entry

    return decorate


def start_process(cfg: DictConfig) -> DistributedContext:
    """Join the ranks and seed them alike; what all of them meet alike is logged by rank 0 only."""
    if "SUBMITIT_EXECUTOR" in os.environ and "RANK" not in os.environ:
        os.environ.update(submitit_ranks())
    context = init_distributed(cfg.device)
    if context.world_size > 1:
        log_as_rank(logging.getLogger().handlers, rank=context.rank, local_rank=context.local_rank)
    seed_everything(cfg.seed, rank=0)
    return context


def submitit_ranks() -> dict[str, str]:
    """What torchrun sets for its processes, for the tasks of a submitit job; nothing for a single task."""
    import submitit

    job = submitit.JobEnvironment()
    if job.num_tasks == 1:
        return {}
    # the same on every task of a job, and seldom that of another job on the machine
    port = 20000 + zlib.crc32(job.job_id.encode()) % 20000
    return {
        "RANK": str(job.global_rank),
        "LOCAL_RANK": str(job.local_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "MASTER_ADDR": job.hostnames[0],
        "MASTER_PORT": str(port),
    }


def on_rank_zero(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; a user error there is raised on every rank alike."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_main():
        try:
            outcome = (make(), None)
        except USER_ERRORS as error:
            outcome = (None, error)
    value, failure = broadcast_object(outcome)
    if failure is not None:
        raise failure
    return cast(T, value)


def print_start(cfg: DictConfig, context: DistributedContext, **lines: object) -> None:
    """The block at the start of a run: machine, versions, commit, kernel, precision, and `lines`."""
    run = {
        "device": f"{context.device} x {context.world_size}",
        "kernel": " ".join(f"{name}={value}" for name, value in cfg.kernel.items() if name != "_target_"),
        "precision": cfg.precision.name,
    }
    print(format_environment(collect_environment(), run | lines), flush=True)


def warn_if_few_cores(num_workers: int) -> None:
    """Say so on rank 0 if the ranks of this machine start more data workers than the CPU cores they may use.

    Args:
        num_workers: Of each rank.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if is_main() and num_workers * num_ranks > num_cores:
        on_ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        _log.warning(
            "data.num_workers=%d%s is more data workers than the %d CPU cores for them: they wait for each other, and "
            "each takes memory. Set data.num_workers=%d, or leave it if reading files takes longer than decoding them",
            *(num_workers, on_ranks, num_cores, max(1, num_cores // num_ranks)),
        )


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain Python, interpolations filled in."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def user_message(error: Exception) -> str | None:
    """What to tell the user, or None if the error is not theirs."""
    if not isinstance(error, InstantiationException):
        return str(error)
    cause: BaseException | None = error
    while isinstance(cause, InstantiationException):
        cause = cause.__cause__
    if isinstance(cause, USER_ERRORS):
        return str(cause)
    if isinstance(cause, TypeError) and "unexpected keyword argument" in str(cause):
        key = str(error).rpartition("full_key: ")[2].strip()
        return (
            f"{key}: {cause}. The key was added with +, or the experiment sets keys of another choice than "
            f"{key}= was given; leave one of them out"
        )
    return None


def require_lists(cfg: DictConfig, examples: Mapping[str, str]) -> None:
    """Refuse keys that are neither lists nor null: a text would be taken letter by letter.

    Args:
        cfg: Of the tool.
        examples: What to give, by key.

    Raises:
        ValueError: The first such key.
    """
    for key, example in examples.items():
        if cfg[key] is not None and not isinstance(cfg[key], ListConfig):
            raise ValueError(f"{key} is a list, as in '{key}={example}'; got {cfg[key]}")


def fail(text: str, code: int = 1) -> None:
    """Print an error and leave with an exit code; under torchrun its own report ends with the text."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and os.environ.get("LOCAL_RANK") != "0":
        # all ranks mostly meet the same error, and torchrun ends those of its machine once the first has said it
        time.sleep(SECONDS_FOR_FIRST_RANK)
    print(f"error: {text}\n(HYDRA_FULL_ERROR=1 shows the stack trace)", file=sys.stderr, flush=True)
    if error_file:
        # that report is a screen of torchrun's own stack, behind which the line above is out of sight; where the disk
        # is full, which may be the error, that line has to do
        with suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
    raise SystemExit(code)
