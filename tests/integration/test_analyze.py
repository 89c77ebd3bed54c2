"""A report from detections, checked with an HTML parser."""

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr.data import CocoDataset, SyntheticDataset, flip_and_resize
from detr.data.repeated import RepeatedDataset

Tool = Callable[..., str]

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Fails on tags that do not close in order; collects texts, headings and picture sources."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.pictures: list[str] = []
        self.num_rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.num_rows += tag == "tr"
        if tag == "img":
            self.pictures.append(str(dict(attrs)["src"]))
        for name, value in attrs:
            # nothing is fetched
            assert name not in ("href", "src") or str(value).startswith("data:")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_report_is_one_whole_page(tool: Tool, refused: Tool, tmp_path: Path):
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (80, 60), "navy").save(photos / "a.png")
    (photos / "b.png").write_bytes(b"no image")
    categories = [{"id": 5, "name": "cat <b>&"}, {"id": 9, "name": "dog"}, {"id": 11, "name": "never"}]
    annotations = [
        {"id": 0, "image_id": "a", "category_id": 5, "bbox": [5, 5, 20, 20]},
        {"id": 1, "image_id": "a", "category_id": 9, "bbox": [40, 5, 20, 20]},
        {"id": 2, "image_id": "b", "category_id": 9, "bbox": [5, 5, 20, 20]},
    ]
    images = [{"id": name, "file_name": f"{name}.png", "width": 80, "height": 60} for name in "ab"]
    found = [
        {"image_id": "a", "category_id": 5, "bbox": [5, 5, 20, 20], "score": 0.9},
        {"image_id": "a", "category_id": 5, "bbox": [40, 5, 20, 20], "score": 0.8},
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "gt.json").write_text(json.dumps(content))
    (tmp_path / "found.json").write_text(json.dumps(found))
    out = tool("analyze", "detections=found.json", "annotations=gt.json", "images=photos")
    assert "1 correct, 0 duplicate, 1 classification, 0 localisation, 0 both, 0 background, 1 missed" in out

    page = Page()
    page.feed((tmp_path / "outputs" / "analyze_found_gt" / "report.html").read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    text = " ".join(page.texts)
    # a string that should have been filled in
    assert not re.search(r"\{[a-z_.]+[(}]", text), text
    assert "cat <b>&" in text
    assert "a.png: 1 mistakes (1 classification)" in text
    assert "2 images, 3 objects, 2 detections" in text
    # curves at two overlaps, confusion, and two pictures of the one image that can be read, made large enough to read
    assert len(page.pictures) == 5
    assert [Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2]))).size for source in page.pictures][
        3:
    ] == [(640, 480)] * 2
    for source in page.pictures:
        picture = Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2])))
        picture.load()
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 1
    analysis = json.loads((tmp_path / "outputs" / "analyze_found_gt" / "analysis.json").read_text())
    assert [each["AP"] for each in analysis["classes"]] == [pytest.approx(1.0), 0.0, None]
    assert "takes evaluation=FOLDER, or" in refused("analyze", "detections=found.json")
    message = refused("analyze", "evaluation=photos")
    assert "evaluation=photos is no folder of tools/evaluate.py" in message
    assert "python tools/evaluate.py checkpoint=FILE" in message


def test_a_report_without_anything_found(tool: Tool, tmp_path: Path):
    content = {"images": [{"id": 1}], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "gt.json").write_text(json.dumps(content))
    (tmp_path / "found.json").write_text("[]")
    tool("analyze", "detections=found.json", "annotations=gt.json", "images=.")
    assert "None has a mistake" in (tmp_path / "outputs" / "analyze_found_gt" / "report.html").read_text()


def test_a_checkpoint_gets_its_report_with_its_images_in_one_command(
    tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path
):
    for split in ("train", "val"):
        SyntheticDataset(split, flip_and_resize(None), num_images=4, size=64).write_coco(tmp_path / "coco")
    files = ("data=coco", "data.root=coco", "data.num_workers=0", "backbone.name=test_resnet", "device=cpu")
    tool("train", *files, "schedule.epochs=1", "name=files")
    tool("train", *tiny)
    for name in ("files", "debug_cpu"):
        common = ("evaluate", f"checkpoint=outputs/{name}/best.pt", f"output_dir=found_{name}")
        out = tool(*common, "report=true")
        assert f"wrote found_{name}/report.html; open it in a browser" in out
        page = Page()
        page.feed((tmp_path / f"found_{name}" / "report.html").read_text(encoding="utf-8"))
        # three figures, and a pair of each image with a mistake; one epoch finds nothing, so of all with objects
        assert len(page.pictures) >= 3 + 2
        assert "000001.png" in " ".join(page.texts)
        # the same folder serves with and without
        tool(*common)
    message = refused("evaluate", "detections=x.json", "data.val.annotations=y.json", "report=true", "name=none")
    assert "python tools/analyze.py detections=x.json annotations=y.json" in message


def test_originals_are_the_images_of_the_ground_truth(tmp_path: Path):
    drawn = SyntheticDataset("val", flip_and_resize(32), num_images=2, size=64)
    drawn.write_coco(tmp_path)
    annotations = tmp_path / "annotations" / "instances_val.json"
    files = CocoDataset(annotations, tmp_path / "val", flip_and_resize(32), training=False)
    for image in drawn.coco_ground_truth()["images"]:
        first, second = (dataset.original(image["file_name"]) for dataset in (drawn, RepeatedDataset(files, 2)))
        assert first.shape == (3, 64, 64)
        assert torch.equal(first, second)
