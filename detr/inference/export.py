"""A detector as one file that runs without this project: torch.export, AOTInductor or ONNX."""

import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from detr.evaluation import top_detections
from detr.structures import ImageBatch

ExportFormat = Literal["torch_export", "aot_inductor", "onnx"]
SUFFIXES: dict[ExportFormat, str] = {"torch_export": ".pt2", "aot_inductor": ".aoti.pt2", "onnx": ".onnx"}

INPUT_NAMES = ("pixels", "sizes")
OUTPUT_NAMES = ("scores", "labels", "boxes")

# outputs are compared with those of the model in Python at this tolerance: scores, and boxes over the image's side
TOLERANCE = 1e-4

_MAX_BATCH = 1024

Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class ExportableDetector(nn.Module):
    """Images to their best detections, tensors in and out.

    Args:
        model: The detector in evaluation mode, with kernel=reference: its sampling is grid_sample, which every
            runtime has.
        max_detections: Detections an image, T.
    """

    def __init__(self, model: nn.Module, max_detections: int) -> None:
        super().__init__()
        self.model = model
        self.max_detections = max_detections

    def forward(self, pixels: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Detect.

        Args:
            pixels: (N, 3, H, W) uint8 RGB, each image in the top left corner, zero beyond it.
            sizes: (N, 2) int64, (h, w) of each image without its padding.

        Returns:
            scores (N, T) float32 in [0, 1], best first; labels (N, T) int64; boxes (N, T, 4) float32,
            (x0, y0, x1, y1) in pixels of the resized image of `sizes`.
        """
        output = self.model(ImageBatch(pixels, sizes))
        return top_detections(output.pred_logits, output.pred_boxes, sizes, max_detections=self.max_detections)


def example_inputs(num_images: int, height: int, width: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise of the exported size, the last image smaller than its frame."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (num_images, 3, height, width), dtype=torch.uint8, generator=generator)
    sizes = torch.tensor([[height, width]]).repeat(num_images, 1)
    sizes[-1] = torch.tensor([max(1, height * 3 // 4), max(1, width * 5 // 6)])
    h, w = sizes[-1].tolist()
    pixels[-1, :, h:] = 0
    pixels[-1, :, :, w:] = 0
    return pixels, sizes


def trace(detector: ExportableDetector, height: int, width: int) -> ExportedProgram:
    """The detector as a graph for images padded to (`height`, `width`), any number at once."""
    # PyTorch 2.14 compares sizes with the batch's where a linear layer's weight is frozen, which fixes the batch
    detector.requires_grad_(True)
    batch = {0: Dim("batch", min=1, max=_MAX_BATCH)}
    with torch.no_grad():
        # two images: a batch of one would be taken for a constant
        return torch.export.export(
            detector, example_inputs(2, height, width), dynamic_shapes=dict.fromkeys(INPUT_NAMES, batch)
        )


def require_exporter(export_format: ExportFormat) -> None:
    """Know before a minute of tracing whether a format can be written here.

    Raises:
        ImportError: ONNX was asked for, and its exporter is not installed.
    """
    if export_format == "onnx":
        _require("onnxscript", "format=onnx")


def write_program(program: ExportedProgram, export_format: ExportFormat, path: Path) -> None:
    """Write a traced detector.

    Raises:
        ImportError: ONNX was asked for, and its exporter is not installed.
        ValueError: No such format.
    """
    if export_format == "torch_export":
        torch.export.save(program, path)
    elif export_format == "aot_inductor":
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    elif export_format == "onnx":
        require_exporter(export_format)
        with warnings.catch_warnings():
            # it warns of what it does on its own behalf
            warnings.simplefilter("ignore")
            onnx_program = torch.onnx.export(
                program, dynamo=True, input_names=INPUT_NAMES, output_names=OUTPUT_NAMES, verbose=False
            )
        assert onnx_program is not None
        onnx_program.save(str(path))
    else:
        raise ValueError(f"format must be one of {', '.join(get_args(ExportFormat))}; got {export_format!r}")


def load_exported(export_format: ExportFormat, path: Path) -> Run:
    """The file as a function, run as a user would.

    Raises:
        ImportError: ONNX, and onnxruntime is not installed.
    """
    if export_format == "torch_export":
        return torch.export.load(path).module()
    if export_format == "aot_inductor":
        package: Any = torch._inductor.aoti_load_package(str(path))
        return package
    _require("onnxruntime", "running an ONNX file")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(pixels: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = session.run(list(OUTPUT_NAMES), {"pixels": pixels.numpy(), "sizes": sizes.numpy()})
        scores, labels, boxes = map(torch.as_tensor, outputs)
        return scores, labels, boxes

    return run


def check_exported(
    detector: ExportableDetector, run: Run, height: int, width: int, *, batch_sizes: Sequence[int] = (1, 3)
) -> tuple[float, float]:
    """Compare a file's detections with the detector's on noise, at several batch sizes.

    Returns:
        The largest differences of scores, and of boxes over the longer side.

    Raises:
        ValueError: They differ by more than `TOLERANCE`.
    """
    worst_score = worst_box = 0.0
    for num_images in batch_sizes:
        pixels, sizes = example_inputs(num_images, height, width, seed=num_images)
        with torch.no_grad():
            expected = detector(pixels, sizes)
            found = run(pixels, sizes)
        worst_score = max(worst_score, float((found[0] - expected[0]).abs().max()))
        for image in range(num_images):
            worst_box = max(worst_box, _box_difference(found, expected, image) / max(height, width))
    if worst_score > TOLERANCE or worst_box > TOLERANCE:
        raise ValueError(
            f"the exported file differs from the model by {worst_score:.1e} in scores and {worst_box:.1e} of the image "
            f"in boxes, more than {TOLERANCE:.0e}; do not use it. Give another format=, or another version of it"
        )
    return worst_score, worst_box


def milliseconds_an_image(run: Run, height: int, width: int, *, num_runs: int = 3) -> float:
    """Best wall time of one image on this machine."""
    inputs = example_inputs(1, height, width)
    times = []
    for _ in range(num_runs + 1):
        start = time.perf_counter()
        with torch.no_grad():
            run(*inputs)
        times.append(time.perf_counter() - start)
    # the first also warms up
    return min(times[1:]) * 1000


def _box_difference(found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor], image: int) -> float:
    """Largest difference of a box, in pixels, whatever the order of detections with nearly equal scores."""
    found_scores, found_labels, found_boxes = (output[image] for output in found)
    scores, labels, boxes = (output[image] for output in expected)
    worst = 0.0
    for score, label, box in zip(scores, labels, boxes, strict=True):
        is_candidate = (found_labels == label) & ((found_scores - score).abs() <= TOLERANCE)
        if bool(is_candidate.any()):
            worst = max(worst, float((found_boxes[is_candidate] - box).abs().amax(1).min()))
        elif score > scores[-1] + TOLERANCE:
            # the last ones may be cut off differently
            return torch.inf
    return worst


def _require(package: str, purpose: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{purpose} needs the package {package}, which is not installed; run `pip install "
            "'deformable-detr[onnx]'`, or use format=torch_export"
        )
