"""What a reader copies from the documents works: links, commands, presets, keys and the paths of files and tests."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tools.override_checks import CONFIG_DIR, check_overrides

REPOSITORY = Path(__file__).resolve().parents[2]
# reports of docs/benchmarks are records of a commit: their links are looked at, their commands and lines are not
RECORDS = sorted(REPOSITORY.glob("docs/benchmarks/*.md"))
HAND_WRITTEN = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ops/README.md")),
    *sorted(REPOSITORY.glob("docs/*.md")),
    REPOSITORY / "docs/benchmarks/scaling.md",
]
# whose comments show commands
COMMENTED = [*sorted(CONFIG_DIR.rglob("*.yaml")), *sorted(REPOSITORY.glob("scripts/*.sh"))]
# documents name files from the folder that they speak of
ROOTS = [
    REPOSITORY / name
    for name in (".", "detr", "detr/benchmark", "ops", "ops/msda", "ops/msda/cuda", "tests", "tests/detr")
]
GROUPS = {folder.name for folder in CONFIG_DIR.iterdir() if folder.is_dir()} - {"local", "hydra"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# with variables of the environment before it, as in GPUS=8 bash scripts/prove_scaling.sh
COMMAND = re.compile(r"([A-Z]+=\S+ )*(python (tools|scripts)/|bash scripts/|torchrun .*tools/|pytest .*tests/)")
# FILE, DIR, outputs/NAME, N: for the reader to fill in
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]+\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def prose(document: Path) -> str:
    """A document without its fenced blocks, which keep their lines."""
    return FENCE.sub(lambda block: "\n" * block.group().count("\n"), document.read_text(encoding="utf-8"))


def code_spans(document: Path) -> list[str]:
    # a span may go over the end of a line
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


def anchors(document: Path) -> set[str]:
    """What headings are called in a link, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shown_commands(document: Path) -> Iterator[str]:
    """Lines that are typed into a shell: of fenced blocks and code spans, or of comments."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".md":
        lines = joined("\n".join(FENCE.findall(text))) + code_spans(document)
    else:
        comments = joined("\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#")))
        # what a command does stands behind it, some spaces away
        lines = [re.sub(r"\s{2,}(?=[^ '\"]).*", "", line) for line in comments]
    yield from (line.replace("...", "") for line in lines if COMMAND.match(line))


def joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


# a command that several documents show is tried once
ALL_COMMANDS = {
    command: name_of(document) for document in [*COMMENTED, *HAND_WRITTEN] for command in shown_commands(document)
}


@pytest.mark.parametrize("document", [*HAND_WRITTEN, *RECORDS], ids=name_of)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{target}: there are {sorted(anchors(file))}"


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_a_record_is_linked_from_a_document(record: Path):
    documents = [document for document in [*HAND_WRITTEN, *RECORDS] if document != record]
    assert any(re.search(rf"\]\([^)]*\b{record.name}[)#]", prose(document)) for document in documents)


def test_commands_are_found():
    assert {"README.md", "docs/results.md", "configs/experiment/synthetic_r50.yaml"} <= set(ALL_COMMANDS.values())
    assert len(ALL_COMMANDS) > 80


@pytest.mark.parametrize("command", sorted(ALL_COMMANDS))
def test_a_command_works(command: str):
    words = shlex.split(command, comments=True)
    files = [word for word in words if re.match(r"(tools|scripts|tests)/", word)]
    assert files
    for file in files:
        assert (REPOSITORY / file).exists(), f"{ALL_COMMANDS[command]}: {file} does not exist"
    tool = next((file for file in files if file.startswith("tools/")), None)
    if tool is not None:
        require_overrides(Path(tool).stem, [word for word in words[words.index(tool) + 1 :] if word != "-m"])


def require_overrides(tool: str, overrides: list[str]) -> None:
    """Hydra understands them, keys and presets exist for the tool, and values have their type."""
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if key in GROUPS:
            assert key in groups_of(tool), f"tools/{tool}.py has no group {key}"
            assert (CONFIG_DIR / key / f"{value}.yaml").is_file(), f"there is no configs/{key}/{value}.yaml"
    # in a sweep each value is one of a run
    check_overrides(tool, [re.sub(r"^([\w.]+=[^\[{]*?),.*", r"\1", override) for override in overrides])


@cache
def groups_of(tool: str) -> frozenset[str]:
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return frozenset(compose(tool, return_hydra_config=True).hydra.runtime.choices)


@cache
def all_keys() -> frozenset[str]:
    """Every key of every configuration, by its place in a run."""
    found: set[str] = set()
    for file in CONFIG_DIR.rglob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        group = file.parent.name if file.parent != CONFIG_DIR and "@package _global_" not in text else ""
        found |= set(keys_of(OmegaConf.to_container(OmegaConf.create(text)), group))
    return frozenset(found)


def keys_of(config: Any, prefix: str) -> Iterator[str]:
    yield prefix
    if isinstance(config, dict):
        for name, value in config.items():
            yield from keys_of(value, f"{prefix}.{name}" if prefix else str(name))


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_keys_and_presets_in_a_sentence_exist(document: Path):
    for span in code_spans(document):
        for key, value in re.findall(r"(?:^|(?<= ))([a-z_][\w.]*)=(\S+)", span):
            if key in GROUPS and not PLACEHOLDER.search(value):
                assert (CONFIG_DIR / key / f"{value}.yaml").is_file(), f"`{span}`: there is no configs/{key}/{value}"
            elif "." in key and not key.startswith("hydra"):
                assert key in all_keys(), f"`{span}`: there is no key {key}"


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_files_and_tests_in_a_sentence_exist(document: Path):
    for span in code_spans(document):
        match = re.fullmatch(r"((?:[\w*]+/)+[\w*]+\.(?:py|sh|md|yaml|cuh|csv))(?:::(\w+))?", span)
        if match is None or span.startswith("outputs/"):
            continue
        path, test = match.groups()
        files = [file for root in ROOTS for file in root.glob(path)]
        assert files, f"there is no {path}"
        if test is not None:
            assert any(f"def {test}(" in file.read_text() for file in files), f"{path} has no {test}"


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_extras_that_are_to_be_installed_exist(document: Path):
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"deformable-detr\[(\w+)\]", document.read_text(encoding="utf-8")):
        assert extra in extras


@pytest.mark.parametrize("document", HAND_WRITTEN, ids=name_of)
def test_lines_are_no_longer_than_code_is(document: Path):
    long = [line for line in prose(document).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not long, long
