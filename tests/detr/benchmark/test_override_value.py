"""Paths on the command lines that programs and scripts write: whole, whatever is in them."""

import re
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from detr.benchmark.override_value import quoted_value
from detr.benchmark.steps.matrix import run_matrix

ODD = [
    "two words",
    "ends in a space ",
    "a=b,c",
    "x(1)[2]{3}",
    "it's",
    'a"b"',
    "100%",
    "~home",
    "ends in \\",
    "back\\slash\\' and a quote",
    "$HOME",
    "a:b",
    "größe",
    "図",
]
# with nothing before them
NO_TEXT = ["null", "True", "inf", "NaN", "1e5", "12", "1_000", "-3", ".5", ""]
PLAIN = ["/data/coco", "../d", "./d", "d", "a.b-c_d", "1/2", "null/x"]


def as_hydra_reads(value: str) -> object:
    [override] = OverridesParser.create().parse_overrides([f"output_dir={value}"])
    return override.value()


@pytest.mark.parametrize("text", [*(f"/data/{name}" for name in ODD), *ODD, *NO_TEXT])
def test_a_value_comes_back_as_it_was(text: str):
    assert as_hydra_reads(quoted_value(text)) == text
    [override] = OverridesParser.create().parse_overrides([f"runs=[{quoted_value(text)},b]"])
    assert [str(item) for item in override.value()] == [text, "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_path_stays_as_it_is(text: str):
    assert quoted_value(text) == text
    assert as_hydra_reads(text) == text


@pytest.mark.parametrize("text", [*ODD, *NO_TEXT, *PLAIN])
def test_scripts_quote_as_programs_do(repository: Path, text: str):
    command = ["bash", "-c", 'source scripts/quoted.sh; quoted "$1"', "bash", text]
    ended = subprocess.run(command, cwd=repository, capture_output=True, encoding="utf-8", check=True)
    assert ended.stdout == quoted_value(text) + "\n"


def test_a_row_is_found_in_a_temporary_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "it's, a=b"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    script = tmp_path / "row.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from hydra.core.override_parser.overrides_parser import OverridesParser\n"
        "from detr.benchmark.steps.row import StepRow\n"
        "keys = {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(sys.argv[1:])}\n"
        "Path(keys['result']).write_text(StepRow(keys['row'], keys['repeat'], 'ok', images_per_s=1.0).to_json())\n"
    )
    rows = run_matrix(script, {"a": []}, shared=[], repeats=1, rows_file=tmp_path / "rows.jsonl", num_gpus=1)
    assert [row.status for row in rows] == ["ok"]


def test_no_script_and_no_program_hands_over_a_bare_path(repository: Path):
    """A path behind a key is quoted, wherever a command is made."""
    keys = r"(?:output_dir|data\.root|checkpoints?|extra_rows|result|backbone\.pretrained)"
    in_bash = re.compile(rf'"(?:source|{keys})=\[?\$(?!\(quoted |checkpoints")')
    # the whole of a text: a message says more
    in_python = re.compile(rf'f"{keys}=\{{(?!quoted_value\()[^{{}}"]*\}}"')
    programs = ["tools/*.py", "detr/**/*.py", "scripts/*.py", "tests/integration/*_runs.py"]
    programs += ["tests/integration/*_cases.py", "tests/integration/two_gpus.py"]
    found = [
        f"{path.relative_to(repository)}:{number}: {line.strip()}"
        for pattern, globs in ((in_bash, ["scripts/*.sh"]), (in_python, programs))
        for glob in globs
        for path in sorted(repository.glob(glob))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []
