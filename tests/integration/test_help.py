"""`--help` of every tool: a newcomer finds what it does, its keys, examples, and where the output goes."""

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tools.override_checks import CONFIG_DIR, check_overrides

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = sorted(
    path.stem for path in (REPOSITORY / "tools").glob("*.py") if re.search(r"^@hydra_tool", path.read_text(), re.M)
)


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What a tool prints."""

    def run(tool: str, option: str = "--help") -> str:
        monkeypatch.setattr(sys, "argv", [f"tools/{tool}.py", option])
        capfd.readouterr()
        importlib.import_module(f"tools.{tool}").main()
        return capfd.readouterr().out

    return run


def section(text: str, title: str) -> list[str]:
    """The indented lines under a title."""
    _, _, rest = text.partition(f"\n{title}\n")
    return [line.strip() for line in re.split(r"\n(?=\S|$)", rest)[0].splitlines() if line.strip()]


def test_every_command_is_looked_at():
    assert {"train", "evaluate", "predict", "analyze", "export"} <= set(TOOLS)
    has_main = {path.stem for path in (REPOSITORY / "tools").glob("*.py") if "__main__" in path.read_text()}
    assert set(TOOLS) == has_main


@pytest.mark.parametrize("tool", TOOLS)
def test_the_help_has_every_part(tool: str, help_of: Callable[..., str]):
    text = help_of(tool)
    first, blank, *_ = text.splitlines()
    assert re.fullmatch(r"[A-Z].{20,118}\.", first)
    assert blank == ""
    assert max(map(len, text.splitlines())) <= 120

    keys = section(text, "Keys:")
    assert 3 <= len(keys) <= 6
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose(tool, return_hydra_config=True)
    for line in keys:
        assert_key_is_true(cfg, line)

    examples = section(text, "Examples:")
    assert len(examples) >= 2
    for example in examples:
        command, *overrides = shlex.split(example.partition(f"tools/{tool}.py")[2].strip().join(["x ", ""]))
        assert command == "x"
        assert example.startswith(("python tools/", "torchrun ")), example
        # refuses keys that do not exist
        check_overrides(tool, overrides)

    assert len(" ".join(section(text, "Output:"))) > 40
    assert f"python tools/{tool}.py --cfg job" in text


def assert_key_is_true(cfg: DictConfig, line: str) -> None:
    """The key exists, and has the default that the help says; what is needed has none."""
    match = re.fullmatch(r"([\w.]+)=(\S+)\s{2,}(\S.{3,})", line)
    assert match, line
    key, shown, meaning = match.groups()
    choices = cfg.hydra.runtime.choices
    if key in choices:
        default = choices[key]
    else:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        assert name in node, f"{key} does not exist"
        default = node[name]
    if meaning.startswith("needed"):
        assert default in (None, []), line
        assert shown.isupper(), line
    else:
        assert plain(default) == shown, line


def plain(value: Any) -> str:
    """A value as it is typed on the command line."""
    if OmegaConf.is_list(value):
        return "[" + ",".join(plain(each) for each in value) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("tool", ["train", "check_dataset"])
def test_the_help_lists_the_groups_of_the_tool(tool: str, help_of: Callable[..., str]):
    groups = section(help_of(tool, "-h"), "Groups, as group=option (first: what is used unless you choose):")
    first = {line.split()[0]: line.split()[1].rstrip(",") for line in groups if (CONFIG_DIR / line.split()[0]).is_dir()}
    assert ("model" in first) == (tool == "train")
    assert first["data"] == ("synthetic" if tool == "train" else "custom")
