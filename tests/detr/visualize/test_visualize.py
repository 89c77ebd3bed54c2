"""Pictures: what is drawn where, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from detr.structures import Detections, Target
from detr.visualize import (
    contact_sheet,
    draw_boxes,
    draw_comparison,
    draw_detections,
    draw_target,
    label_color,
    plot_curves,
)


def gray(width: int = 200, height: int = 100) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def test_boxes_are_drawn_in_xy_order_and_the_image_is_left_as_it_is():
    image = gray()
    drawn = draw_boxes(image, torch.tensor([[100.0, 40.0, 180.0, 90.0]]), [0], names=["cell"])
    color = label_color(0)
    for corner in ((100, 40), (180, 40), (100, 90), (180, 90)):
        assert drawn.getpixel(corner) == color
    # nothing inside or right of the box
    assert drawn.getpixel((140, 65)) == drawn.getpixel((190, 65)) == (128, 128, 128)
    assert image.tobytes() == gray().tobytes()


def test_a_tensor_and_a_pillow_image_give_the_same_picture():
    pixels = torch.full((3, 100, 200), 128, dtype=torch.uint8)
    boxes = torch.tensor([[10.0, 20.0, 60.0, 70.0]])
    assert (
        draw_boxes(pixels, boxes, [1], names=["a", "b"]).tobytes()
        == draw_boxes(gray(), boxes, [1], names=["a", "b"]).tobytes()
    )


def test_detections_below_the_score_are_left_out():
    detections = Detections(
        scores=torch.tensor([0.9, 0.1]),
        labels=torch.tensor([0, 1]),
        boxes=torch.tensor([[5.0, 50.0, 50.0, 90.0], [100.0, 50.0, 150.0, 90.0]]),
    )
    drawn = draw_detections(gray(), detections, ["a", "b"], min_score=0.5)
    assert drawn.getpixel((5, 90)) == label_color(0)
    assert drawn.getpixel((100, 90)) == (128, 128, 128)
    assert draw_detections(gray(), detections, ["a", "b"], min_score=0.0).getpixel((100, 90)) == label_color(1)
    assert draw_detections(gray(), detections, ["a", "b"], min_score=0.95).tobytes() == gray().tobytes()


def test_targets_are_scaled_to_the_image():
    target = Target(torch.tensor([0]), torch.tensor([[0.5, 0.5, 0.5, 0.5]]), image_id=1, orig_size=(999, 999))
    drawn = draw_target(gray(), target, ["a"])
    assert drawn.getpixel((50, 25)) == drawn.getpixel((150, 75)) == label_color(0)


@pytest.mark.parametrize(
    "box",
    [
        [-50.0, -50.0, 300.0, 300.0],
        [-20.0, -20.0, -10.0, -10.0],
        [300.0, 10.0, 400.0, 20.0],
        [50.0, 50.0, 50.0, 50.0],
        [60.0, 60.0, 50.0, 50.0],
        [199.5, 99.5, 250.0, 150.0],
    ],
    ids=["around", "left of", "right of", "a point", "inside out", "in the last corner"],
)
def test_boxes_beyond_the_image_draw_without_error(box: list[float]):
    assert draw_boxes(gray(), torch.tensor([box]), [0], names=["a"], scores=[0.5]).size == (200, 100)


@pytest.mark.parametrize("size", [(1, 1), (2, 300), (4000, 30)])
def test_odd_image_sizes(size: tuple[int, int]):
    box = torch.tensor([[0.0, 0.0, float(size[0]), float(size[1])]])
    assert draw_boxes(gray(*size), box, [0], names=["a long name of a class"], scores=[1.0]).size == size


def test_names_in_any_script_are_written():
    boxes = torch.tensor([[20.0, 40.0, 180.0, 90.0]])
    pictures = {
        name: draw_boxes(gray(), boxes, [0], names=[name]).tobytes()
        for name in ("эритроцит", "globule rouge à é", "κύτταρο", "plain", "細胞", "")
    }
    assert len(set(pictures.values())) == len(pictures)


def test_the_best_detection_is_on_top():
    same = torch.tensor([[20.0, 40.0, 180.0, 90.0]]).expand(2, 4)
    drawn = draw_boxes(gray(), same, [0, 1], names=["a", "b"])
    assert drawn.getpixel((180, 90)) == label_color(0)


def test_neighbouring_classes_have_distinct_colors():
    colors = [label_color(label) for label in range(20)]
    distances = [
        max(abs(a - b) for a, b in zip(first, second, strict=True))
        for index, first in enumerate(colors)
        for second in colors[:index]
    ]
    assert min(distances) > 20


def test_what_cannot_be_drawn_is_refused():
    box = torch.tensor([[0.0, 0.0, 9.0, 9.0]])
    with pytest.raises(ValueError, match="label 3 has no name; 2 names were given"):
        draw_boxes(gray(), box, [3], names=["a", "b"])
    with pytest.raises(ValueError, match="NaN or infinity"):
        draw_boxes(gray(), box * float("nan"), [0], names=["a"])
    with pytest.raises(ValueError, match=r"boxes must be \(2, 4\) for 2 labels"):
        draw_boxes(gray(), box, [0, 0], names=["a"])
    with pytest.raises(ValueError, match=r"uint8 RGB or a Pillow image; got torch.float32"):
        draw_boxes(torch.zeros(3, 10, 10), box, [0], names=["a"])


def test_contact_sheets_keep_shapes():
    sheet = contact_sheet([gray(200, 100), gray(50, 100), gray(10, 10)], num_columns=2, tile_px=100)
    # the first row is as high as its tall image, the second as its square one
    assert sheet.size == (200, 200)
    # a wide image leaves white above, a tall one at the left
    assert sheet.getpixel((50, 10)) == sheet.getpixel((110, 50)) == (255, 255, 255)
    assert sheet.getpixel((50, 50)) == sheet.getpixel((150, 50)) == (128, 128, 128)
    # wide images alone leave no white
    assert contact_sheet([gray(200, 100)] * 4, num_columns=2, tile_px=100).size == (200, 100)
    assert contact_sheet([gray()], num_columns=8, tile_px=64).size == (64, 32)
    with pytest.raises(ValueError, match="got 0 images"):
        contact_sheet([])


class TestCurves:
    def write(self, tmp_path: Path, rows: list[dict[str, float | None]]) -> Path:
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def test_loss_and_ap(self, tmp_path: Path):
        rows: list[dict[str, float | None]] = [
            {"step": step, "train/loss": 10 / step, "train/loss_ce": 1 / step, "train/lr": 1e-4}
            for step in range(1, 40)
        ]
        rows[5]["train/loss"] = None
        rows += [{"step": 39, "val/AP": 0.4, "val/AP50": 0.6, "val/APs": -1.0}]
        written = plot_curves(self.write(tmp_path, rows), tmp_path / "curves")
        assert [path.name for path in written] == ["loss.png", "ap.png"]
        for path in written:
            with Image.open(path) as picture:
                assert picture.size[0] > 600
                assert len(set(picture.convert("L").tobytes())) > 10

    def test_a_run_without_evaluation_has_no_ap(self, tmp_path: Path):
        written = plot_curves(self.write(tmp_path, [{"step": 1, "train/loss": 0.0}]), tmp_path)
        assert [path.name for path in written] == ["loss.png"]

    def test_a_run_without_values_has_no_pictures(self, tmp_path: Path):
        assert plot_curves(self.write(tmp_path, []), tmp_path) == []

    def test_pyplot_and_its_global_state_stay_out(self, tmp_path: Path):
        import subprocess

        path = self.write(tmp_path, [{"step": 1, "train/loss": 1.0}])
        code = (
            "import sys; from detr.visualize import plot_curves; "
            f"plot_curves({str(path)!r}, {str(tmp_path)!r}); print('matplotlib.pyplot' in sys.modules)"
        )
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert finished.stdout.strip() == "False"


def test_an_image_that_is_very_long_stays_visible():
    target = Target(torch.tensor([0]), torch.tensor([[0.5, 0.5, 0.5, 1.0]]), image_id=1, orig_size=(1, 3000))
    none = Detections(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    picture = draw_comparison(Image.new("RGB", (3000, 1)), target, none, ["a"])
    assert picture.size == (1024, 1)
