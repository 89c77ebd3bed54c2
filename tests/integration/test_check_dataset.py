"""tools/check_dataset.py as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from detr.data import SyntheticDataset, flip_and_resize

Tool = Callable[..., str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sound dataset in COCO's layout."""
    for split in ("train", "val"):
        SyntheticDataset(split, flip_and_resize(None), num_images=4, size=64, num_classes=2).write_coco(tmp_path / "d")
    return tmp_path / "d"


@pytest.fixture
def check(tool: Tool, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the tool; returns its exit code and what it printed."""

    def run(*overrides: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            tool("check_dataset", *overrides)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(stop.value.code or 0), out + err

    return run


def change(root: Path, **keys: object) -> None:
    path = root / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    content["annotations"][0].update(keys)
    path.write_text(json.dumps(content))


def test_a_sound_root_exits_with_0_and_a_report(check: Callable[..., tuple[int, str]], root: Path, tmp_path: Path):
    code, out = check("data.root=d")
    assert code == 0, out
    assert "train: coco: d/annotations/instances_train.json" in out
    assert "images  4" in out
    report = json.loads((tmp_path / "outputs/check_dataset/report.json").read_text())
    assert report["exit_code"] == 0
    assert set(report["splits"]) == {"train", "val"}
    assert report["splits"]["val"]["summary"]["images"] == 4


def test_faults_exit_with_1_and_name_file_id_and_action(check: Callable[..., tuple[int, str]], root: Path):
    change(root, bbox=[1, 1, 0, 5], id=77)
    (root / "val" / "000002.png").write_bytes(b"broken")
    code, out = check("data.root=d", "report=faults.json")
    assert code == 1
    assert "instances_val.json: annotation 77: bbox [1.0, 1.0, 0.0, 5.0] has no area" in out
    assert "-> dropped from training" in out
    assert "d/val/000002.png: image 2: cannot read the image" in out
    report = json.loads(Path("faults.json").read_text())
    found = {fault["kind"]: fault for fault in report["splits"]["val"]["faults"]}
    assert found["box_zero_size"]["annotation_id"] == 77
    assert found["image_unreadable"]["image_id"] == 2
    assert report["splits"]["train"]["exit_code"] == 0


def test_one_file_with_or_without_its_images(check: Callable[..., tuple[int, str]], root: Path):
    (root / "val" / "000002.png").unlink()
    file = "data.val.annotations=d/annotations/instances_val.json"
    code, out = check(file)
    assert code == 0
    assert "images not checked" in out
    code, out = check(file, "data.val.images=d/val")
    assert code == 1
    assert "image_missing" in out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "what is to be checked? Set data.root"),
        (["data.root=nowhere"], "data.root=nowhere is not a folder"),
        (["data.val.annotations=no.json"], "there is no annotation file"),
        (["data.val.annotations=broken.json"], "is not valid JSON"),
        (["data.rot=d"], "did you mean data.root?"),
    ],
)
def test_what_cannot_be_used_exits_with_2(
    check: Callable[..., tuple[int, str]], tmp_path: Path, overrides: list[str], words: str
):
    (tmp_path / "broken.json").write_text("{")
    code, out = check(*overrides)
    assert code == 2
    assert words in out
