"""What is typed behind a tool, checked before Hydra runs: keys that do not exist, values of another type."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"

# of Hydra's command line, which are the only ones with dashes
_HYDRA_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion"),
        *("config-path", "config-name", "config-dir", "experimental-rerun", "info"),
    )
) | {"-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i"}
_ABSENT = object()


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
    with _composing():
        try:
            loader = GlobalHydra.instance().config_loader()
            overrides = OverridesParser.create(loader).parse_overrides(texts)
            choices = [override for override in overrides if loader.get_group_options(override.key_or_group)]
            cfgs = [compose(config_name, chosen, return_hydra_config=True) for chosen in _chosen_options(choices)]
        except HydraException:
            # a syntax error or an unknown option of a group, which Hydra explains well when it runs
            return
        # of all groups those that this tool has
        used = set(cfgs[0].hydra.runtime.choices)
        groups = [group for group in loader.get_group_options("", results_filter=ObjectType.GROUP) if group in used]
        absent = [
            override.key_or_group
            for override in overrides
            if _names_a_key(override) and not any(_has_key(cfg, override.key_or_group) for cfg in cfgs)
        ]
        for key in absent:
            if key.startswith("data.") and "data" in used:
                options = loader.get_group_options("data")
                _require_choice(key, {option: compose(config_name, [f"data={option}"]).data for option in options})
    for override in overrides:
        if override not in choices and _names_a_key(override):
            having = [cfg for cfg in cfgs if _has_key(cfg, override.key_or_group)]
            default = _require_key([*having, *cfgs][0], override.key_or_group, extra_names=groups)
            _require_type(override, default)


def _chosen_options(choices: Sequence[Override]) -> list[list[str]]:
    """Options to compose so that each one of a sweep (`experiment=a,b`) occurs, which may have keys of its own."""
    options = [
        [f"{choice.get_key_element()}={value}" for value in choice.sweep_string_iterator()]
        if choice.is_discrete_sweep()
        else [str(choice.input_line)]
        for choice in choices
    ]
    # a pattern that fits nothing has none, which Hydra says
    options = [values for values in options if values]
    first = [values[0] for values in options]
    others = [
        [*first[:place], value, *first[place + 1 :]] for place, values in enumerate(options) for value in values[1:]
    ]
    return [first, *others]


def check_rows(config_name: str, rows: Mapping[str, Iterable[str]]) -> None:
    """Refuse overrides with which a tool would end at its start, before the first of many runs of it.

    Args:
        config_name: Of the tool that runs the rows.
        rows: Overrides by name.

    Raises:
        ValueError: The first row whose overrides have an unknown key, or do not compose; with what the tool would say.
    """
    for name, overrides in rows.items():
        texts = list(overrides)
        try:
            check_overrides(config_name, texts)
            with _composing():
                compose(config_name, [text for text in texts if not text.startswith("-")])
        except (ValueError, HydraException) as error:
            raise ValueError(f"row {name} of {config_name} would fail: {error}") from error


@contextmanager
def _composing() -> Iterator[None]:
    """Hydra for `compose`, also within a main, which gets its own back."""
    of_main = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        if of_main is not None:
            GlobalHydra.instance().initialize(of_main)


def _require_choice(key: str, datasets: Mapping[str, DictConfig]) -> None:
    """Refuse a key that the chosen data lacks and other data has, naming that."""
    name = key.removeprefix("data.")
    having = [choice for choice, node in datasets.items() if _has_key(node, name)]
    if having:
        raise ValueError(
            f"unknown key {key}: the chosen data has no such key, {' and '.join(f'data={it}' for it in having)} "
            f"{'has' if len(having) == 1 else 'have'} it; add data={'custom' if 'custom' in having else having[0]}"
        )


def _has_key(cfg: DictConfig, key: str) -> bool:
    return OmegaConf.select(cfg, key, default=_ABSENT) is not _ABSENT


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
