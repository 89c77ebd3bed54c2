"""What every tool shares: Hydra from any working directory, and errors a user can act on."""

import difflib
import logging
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from detr.distributed import DistributedContext, broadcast_object, cleanup, init_distributed, is_main
from detr.engine.preemption import REQUEUE_EXIT_CODE, Preempted
from detr.engine.random_state import seed_everything
from detr.telemetry.environment import collect_environment, format_environment
from ops import BackendUnavailable
from tools.help_text import help_text

T = TypeVar("T")

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"

# mistakes of the user, whose text says what to do; anything else is ours and keeps its stack trace
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError, MemoryError, BackendUnavailable)


# of Hydra's command line, which are the only ones with dashes
_HYDRA_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion"),
        *("config-path", "config-name", "config-dir", "experimental-rerun", "info"),
    )
) | {"-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i"}
_ABSENT = object()


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
    """Join the ranks and seed them alike; ranks above 0 say warnings only."""
    if "SUBMITIT_EXECUTOR" in os.environ and "RANK" not in os.environ:
        os.environ.update(submitit_ranks())
    context = init_distributed(cfg.device)
    if context.rank > 0:
        for name in ("detr", "ops"):
            logging.getLogger(name).setLevel(logging.WARNING)
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
    """Print an error and leave with an exit code."""
    print(f"error: {text}\n(HYDRA_FULL_ERROR=1 shows the stack trace)", file=sys.stderr, flush=True)
    raise SystemExit(code)


def require_keys(arguments: Sequence[str]) -> None:
    """Refuse options as other tools take them (`--epochs 3`); Hydra's own keep their dashes.

    Raises:
        ValueError: The first of them, with how it is written here.
    """
    for position, text in enumerate(arguments):
        match = re.fullmatch(r"--?([A-Za-z][\w.-]*?)(?:=(.*))?", text)
        if match is None or f"--{match[1]}" in _HYDRA_OPTIONS or text in _HYDRA_OPTIONS:
            continue
        value = match[2] or next((follow for follow in arguments[position + 1 :][:1] if "=" not in follow), "VALUE")
        raise ValueError(
            f"{text}: settings are written key=value without dashes, as in {match[1].replace('-', '_')}={value}; "
            "--help lists the main ones"
        )


def check_overrides(config_name: str, arguments: Iterable[str]) -> None:
    """Refuse a key that does not exist, naming those that do; Hydra itself names none.

    Raises:
        ValueError: The first unknown key.
    """
    texts = [text for text in arguments if not text.startswith("-")]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            overrides = OverridesParser.create().parse_overrides(texts)
            loader = GlobalHydra.instance().config_loader()
            choices = [override for override in overrides if loader.get_group_options(override.key_or_group)]
            chosen = [str(choice.input_line) for choice in choices if not choice.is_sweep_override()]
            cfg = compose(config_name, chosen, return_hydra_config=True)
        except HydraException:
            # a syntax error or an unknown option of a group, which Hydra explains well when it runs
            return
        # of all groups those that this tool has
        used = set(cfg.hydra.runtime.choices)
        groups = [group for group in loader.get_group_options("", results_filter=ObjectType.GROUP) if group in used]
        absent = [
            override.key_or_group
            for override in overrides
            if _names_a_key(override) and OmegaConf.select(cfg, override.key_or_group, default=_ABSENT) is _ABSENT
        ]
        for key in absent:
            if key.startswith("data.") and "data" in used:
                options = loader.get_group_options("data")
                _require_choice(key, {option: compose(config_name, [f"data={option}"]).data for option in options})
    for override in overrides:
        if override not in choices and _names_a_key(override):
            default = _require_key(cfg, override.key_or_group, extra_names=groups)
            _require_type(override, default)


def _require_choice(key: str, datasets: Mapping[str, DictConfig]) -> None:
    """Refuse a key that the chosen data lacks and other data has, naming that."""
    name = key.removeprefix("data.")
    having = [
        choice for choice, node in datasets.items() if OmegaConf.select(node, name, default=_ABSENT) is not _ABSENT
    ]
    if having:
        raise ValueError(
            f"unknown key {key}: the chosen data has no such key, {' and '.join(f'data={it}' for it in having)} "
            f"{'has' if len(having) == 1 else 'have'} it; add data={'custom' if 'custom' in having else having[0]}"
        )


def _names_a_key(override: Override) -> bool:
    return not (override.is_add() or override.is_force_add() or override.key_or_group.startswith("hydra"))


def _keys_ending_in(cfg: DictConfig, name: str) -> list[str]:
    """The keys of groups with a given last name, as epochs is that of schedule.epochs."""
    return [
        f"{group}.{name}"
        for group, node in cfg.items_ex(resolve=False)
        if isinstance(node, DictConfig) and group != "hydra" and name in node
    ]


def _require_type(override: Override, default: Any) -> None:
    """Refuse what is no switch, whole number or number where the configuration has one."""
    key, given = override.key_or_group, override.value()
    if isinstance(given, str) and given.startswith("${"):
        return
    if isinstance(default, bool):
        # a path is a third choice for weights
        if key != "backbone.pretrained" and isinstance(given, str | int | float) and not isinstance(given, bool):
            raise ValueError(f"{key} is true or false, as in {str(default).lower()}; got {given}")
    elif isinstance(default, int):
        if isinstance(given, str | bool | float):
            raise ValueError(f"{key} is a whole number, as in {default}; got {given}")
    elif isinstance(default, float) and (
        isinstance(given, str | bool) or (isinstance(given, float) and not math.isfinite(given))
    ):
        raise ValueError(f"{key} is a number, as in {default}; got {given}")


def _require_key(cfg: DictConfig, key: str, *, extra_names: list[str]) -> Any:
    """The default of a key that exists."""
    node: Any = cfg
    path: list[str] = []
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            if node is None or isinstance(node, str | int | float | bool):
                raise ValueError(f"unknown key {key}: {'.'.join(path)} is a value ({node}), not a group of keys")
            return None
        if part not in node:
            names = [str(name) for name in node] + ([] if path else extra_names)
            prefix = ".".join(path) + "." if path else ""
            names = sorted({prefix + name for name in names if not name.startswith("_")})
            close = difflib.get_close_matches(prefix + part, names, n=1)
            if not path and key == part:
                close = _keys_ending_in(cfg, part) or close
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ValueError(f"unknown key {prefix}{part}; {hint}Valid names: {', '.join(names)}")
        path.append(part)
        node = None if OmegaConf.is_missing(node, part) else node[part]
    return node
