"""The share of the encoder in the detector's arithmetic.

Counted on the meta device: matrix products and convolutions by `torch.utils.flop_counter`, two operations a
multiply-add. The counter does not know bilinear sampling, so that is added by a formula: five multiply-adds a sampled
channel, of which four interpolate and one weighs (Deformable DETR, appendix A.1). Norms, softmax, activations,
dropout, sampling coordinates and position encodings are left out on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from detr.benchmark.findings.report import table
from detr.benchmark.origin import Origin
from detr.models import DeformableDETR
from detr.structures import ImageBatch
from ops import MSDeformAttn

CLAIMED_SHARE = 0.49
PARTS = ("backbone", "neck", "encoder", "queries", "decoder", "heads")
FLOPS_A_MULTIPLY_ADD = 2
MULTIPLY_ADDS_A_SAMPLED_CHANNEL = 5


@dataclass(frozen=True)
class FlopRow:
    """One part of the detector; the order of the fields is the order of the columns.

    Attributes:
        part: One of `PARTS`, or `total`. Box heads that refine between decoder layers count for the decoder.
        products: Operations of matrix products and convolutions.
        sampling: Operations of bilinear sampling.
        products_share: Of all products, in [0, 1].
        share: Of all operations.
    """

    part: str
    products: int
    sampling: int
    products_share: float
    share: float


def sampling_flops(attention: MSDeformAttn, num_queries: int) -> int:
    """Operations of the sampling of one attention layer and image."""
    samples = num_queries * attention.num_heads * attention.num_levels * attention.num_points
    head_dim = attention.d_model // attention.num_heads
    return samples * head_dim * MULTIPLY_ADDS_A_SAMPLED_CHANNEL * FLOPS_A_MULTIPLY_ADD


def detector_flops(model: DeformableDETR, *, height: int, width: int) -> list[FlopRow]:
    """The parts of a detector and their total, for the forward pass of one image without padding.

    Args:
        model: On the meta device, with the reference kernel.
        height, width: Of the image, in pixels.
    """
    images = ImageBatch.from_images([torch.zeros(3, height, width, dtype=torch.uint8)]).to("meta")
    cells: list[int] = []

    def note_cells(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        cells.append(inputs[0].shape[1])

    # the counter hooks into autograd where a parameter needs a gradient, and fails under no_grad
    model = model.eval().requires_grad_(False)
    hook = model.encoder.register_forward_pre_hook(note_cells)
    with FlopCounterMode(display=False) as counter:
        model(images)
    hook.remove()
    (num_cells,) = cells
    name = type(model).__name__
    counts = {part: sum(of_part.values()) for part, of_part in counter.get_flop_counts().items()}
    products = {part: counts.get(f"{name}.{part}", 0) for part in PARTS}
    total = counter.get_total_flops()
    # heads are called from the decoder and under their own names, so the rest is theirs
    products["heads"] = total - sum(count for part, count in products.items() if part != "heads")
    sampling = {
        "encoder": _sampling_of(model.encoder, num_cells),
        "decoder": _sampling_of(model.decoder, model.num_queries),
    }
    everything = total + sum(sampling.values())
    rows = [
        FlopRow(part, count, extra, count / total, (count + extra) / everything)
        for part in PARTS
        for count, extra in [(products[part], sampling.get(part, 0))]
    ]
    return [*rows, FlopRow("total", total, everything - total, 1.0, 1.0)]


def verdict(rows: Sequence[FlopRow]) -> str:
    """One line on the claim."""
    encoder = next(row for row in rows if row.part == "encoder")
    found = f"{encoder.products_share:.1%} of the products, {encoder.share:.1%} with sampling"
    is_close = min(abs(share - CLAIMED_SHARE) for share in (encoder.products_share, encoder.share)) < 0.02
    return f"{'reproduced' if is_close else 'different'}: the encoder is {found}, claimed {CLAIMED_SHARE:.0%}"


def markdown(rows: Sequence[FlopRow], origin: Origin) -> str:
    """The report."""
    cells = [
        (
            row.part,
            f"{row.products / 1e9:.2f}",
            f"{row.sampling / 1e9:.2f}",
            f"{row.products_share:.1%}",
            f"{row.share:.1%}",
        )
        for row in rows
    ]
    header = ("part", "products, GFLOP", "sampling, GFLOP", "share of products", "share of both")
    lines = [*origin.lines(), "", f"Verdict: {verdict(rows)}.", "", *table(header, cells), ""]
    lines += [
        "The forward pass of one image. Products are matrix products and convolutions, counted by "
        "`torch.utils.flop_counter`, two operations a multiply-add. Sampling is five multiply-adds a sampled channel. "
        "Norms, softmax, activations, coordinates and position encodings are in neither.",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Sequence[FlopRow], path: Path, *, title: str) -> None:
    """A bar a part."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    parts = [row for row in rows if row.part != "total"]
    products = [row.products / 1e9 for row in parts]
    axes.barh([row.part for row in parts], products, color="#4c78a8", label="products")
    sampling = [row.sampling / 1e9 for row in parts]
    axes.barh([row.part for row in parts], sampling, left=products, color="#f58518", label="sampling")
    axes.invert_yaxis()
    axes.set_xlabel("GFLOP, forward pass of one image")
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _sampling_of(module: nn.Module, num_queries: int) -> int:
    return sum(sampling_flops(child, num_queries) for child in module.modules() if isinstance(child, MSDeformAttn))
