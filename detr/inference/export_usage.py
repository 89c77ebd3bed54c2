"""What a user of an exported file needs: its size, its classes, and the code that runs it."""

from pathlib import Path
from typing import Any

from detr.engine.checkpoint import Checkpoint

_RUN = {
    "onnx": (
        "import onnxruntime",
        'session = onnxruntime.InferenceSession("{path}")\n'
        'scores, labels, boxes = session.run(None, {{"pixels": pixels, "sizes": sizes}})',
    ),
    "torch_export": (
        "import torch",
        'model = torch.export.load("{path}").module()\n'
        "with torch.no_grad():\n"
        "    outputs = model(torch.from_numpy(pixels), torch.from_numpy(sizes))\n"
        "scores, labels, boxes = (output.numpy() for output in outputs)",
    ),
    "aot_inductor": (
        "import torch",
        'model = torch._inductor.aoti_load_package("{path}")\n'
        "with torch.no_grad():\n"
        "    outputs = model(torch.from_numpy(pixels), torch.from_numpy(sizes))\n"
        "scores, labels, boxes = (output.numpy() for output in outputs)",
    ),
}


def exported_size(preprocessing: dict[str, Any], height: int | None, width: int | None) -> tuple[int, int]:
    """(height, width) in pixels of the images an exported file takes.

    Raises:
        ValueError: One of the two is missing and the checkpoint's resizing names no size, or one is not positive.
    """
    if (height is None) != (width is None):
        raise ValueError(f"give height= and width=, or neither; got height={height} and width={width}")
    if height is None or width is None:
        size, max_size = preprocessing["resize"]["size"], preprocessing["resize"]["max_size"]
        if size is None:
            raise ValueError(
                "the model was trained on images at their own size, and an exported file has one size; add it in "
                "pixels, large enough for your images, as in height=480 width=640"
            )
        height, width = (size, max_size or size) if isinstance(size, int) else size
    if not all(isinstance(side, int) and side > 0 for side in (height, width)):
        raise ValueError(f"height and width are whole numbers of pixels above 0; got {height} and {width}")
    return height, width


def describe_export(checkpoint: Checkpoint, height: int, width: int, max_detections: int) -> dict[str, Any]:
    """The content of model.json, which stands beside an exported file."""
    table = checkpoint.class_table
    return {
        "inputs": {
            "pixels": f"(N, 3, {height}, {width}) uint8 RGB, image in the top left corner, zeros beyond it",
            "sizes": "(N, 2) int64, (h, w) of each image without the zeros",
        },
        "outputs": {
            "scores": f"(N, {max_detections}) float32, best first",
            "labels": f"(N, {max_detections}) int64, rows of `classes`",
            "boxes": f"(N, {max_detections}, 4) float32, (x0, y0, x1, y1) in pixels of the resized image",
        },
        "height": height,
        "width": width,
        "preprocessing": checkpoint.preprocessing,
        "classes": [
            {"name": name, "category_id": id} for name, id in zip(table.names, table.category_ids, strict=True)
        ],
        "metrics": {name: value for name, value in checkpoint.metrics.items() if name != "per_class"},
    }


def usage(export_format: str, path: Path, height: int, width: int) -> str:
    """A script that runs an exported file on one image; needs numpy, Pillow and the runtime."""
    imports, run = _RUN[export_format]
    return f"""import json
import numpy as np
{imports}
from PIL import Image, ImageOps

image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
scale = min({height} / image.height, {width} / image.width)
h, w = round(image.height * scale), round(image.width * scale)
pixels = np.zeros((1, 3, {height}, {width}), np.uint8)
pixels[0, :, :h, :w] = np.asarray(image.resize((w, h), Image.BILINEAR)).transpose(2, 0, 1)
sizes = np.array([[h, w]], np.int64)
{run.format(path=path)}
classes = json.load(open("{path.with_name("model.json")}"))["classes"]
for score, label, box in zip(scores[0], labels[0], boxes[0]):
    if score >= 0.3:
        print(classes[label]["name"], round(float(score), 2), (box / scale).round().tolist())
"""
