"""How far samples lie from what their query looks at, over many images: what decides which kernel window fits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detr.models.sampling import LayerSampling

PERCENTILES = (50, 90, 95, 99, 100)
WINDOWS_PX = (1, 2, 4, 8, 16, 32)

# a bin is this wide; what lies further than the last counts as there
_BIN_PX = 0.125
_NUM_BINS = 4096


class SamplingStats:
    """Histograms of distances by layer, level and head, filled image by image.

    The distance of a sample is the larger of |x| and |y| to its query's centre, in cells of the level it is on:
    the half side of a square window that holds it.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._outside: dict[str, Tensor] = {}

    def add(self, layers: Sequence[LayerSampling]) -> None:
        """Count the samples of one forward pass; queries in the padding are left out."""
        for layer in layers:
            distance = layer.offsets_px().abs().amax(-1)[layer.is_query]  # (Q, M, L, P)
            weights = layer.weights[layer.is_query].double()
            inside = layer.locations[layer.is_query]
            is_outside = ((inside < 0) | (inside > 1)).any(-1)  # (Q, M, L, P)
            _, M, L, _ = distance.shape
            # a NaN or endless offset counts as the farthest
            bins = torch.nan_to_num(distance / _BIN_PX, nan=torch.inf).clamp(max=_NUM_BINS - 1).long()
            cell = torch.arange(M * L, device=bins.device).view(1, M, L, 1) * _NUM_BINS
            flat = (bins + cell).flatten()
            size = M * L * _NUM_BINS
            counts = torch.bincount(flat, minlength=size).view(M, L, _NUM_BINS).cpu()
            weighted = torch.bincount(flat, weights.flatten(), minlength=size).view(M, L, _NUM_BINS).cpu()
            outside = is_outside.sum((0, 3)).cpu()  # (M, L)
            for table, new in ((self._counts, counts), (self._weights, weighted), (self._outside, outside)):
                table[layer.name] = table[layer.name] + new if layer.name in table else new

    def rows(self, cell_sizes_px: Sequence[int]) -> list[dict[str, Any]]:
        """One row a layer, level and head, and one a layer and level over all heads (head null); plain values.

        `percentiles_px` are in cells of the level, upper edges of bins of 1/8 cell; `percentiles_image_px` in pixels of
        the resized image. `within_N_px`: share of samples within N cells;
        `weight_within_N_px`: their share of attention on this level.

        Args:
            cell_sizes_px: Stride of each level: pixels of the resized image that a cell is wide.

        Raises:
            ValueError: Nothing was added.
        """
        if not self._counts:
            raise ValueError("no samples were recorded; run the model inside record_sampling, and give images")
        rows = []
        for name, counts in self._counts.items():
            M, L, _ = counts.shape
            for level in range(L):
                for head in (None, *range(M)):
                    heads = slice(None) if head is None else slice(head, head + 1)
                    described = _describe(
                        counts[heads, level].sum(0),
                        self._weights[name][heads, level].sum(0),
                        int(self._outside[name][heads, level].sum()),
                    )
                    cell_px = cell_sizes_px[level]
                    in_image = {key: value * cell_px for key, value in described["percentiles_px"].items()}
                    place = {"layer": name, "level": level, "head": head, "cell_px": cell_px}
                    rows.append(place | described | {"percentiles_image_px": in_image})
        return rows


def format_sampling(rows: Sequence[dict[str, Any]]) -> str:
    """The rows over all heads as a table for people."""
    lines = [f"{'layer':<18} level  median    p95    p99    max   within 4   within 8   within 16   outside"]
    for row in rows:
        if row["head"] is None:
            p = row["percentiles_px"]
            lines.append(
                f"{row['layer']:<18} {row['level']:>5}  {p['50']:>6.2f} {p['95']:>6.2f} {p['99']:>6.2f}"
                f" {p['100']:>6.1f}"
                f"   {row['within_4_px']:>8.1%}   {row['within_8_px']:>8.1%}   {row['within_16_px']:>9.1%}"
                f"   {row['outside']:>7.1%}"
            )
    return "\n".join(lines)


def sampling_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: over all heads, and the 95th percentile of each head in cells."""
    lines = [
        "| layer | level | cell, px | median | p90 | p95 | p99 | max | p95, image px | within 4 cells | 8 | 16 "
        "| outside | attention |",
        "|" + "---|" * 14,
    ]
    num_heads = 1 + max((row["head"] for row in rows if row["head"] is not None), default=-1)
    by_head = ["| layer | level | " + " | ".join(f"head {head}" for head in range(num_heads)) + " |"]
    by_head.append("|" + "---|" * (num_heads + 2))
    of_heads: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        p = row["percentiles_px"]
        if row["head"] is not None:
            of_heads.setdefault((row["layer"], row["level"]), []).append(f"{p['95']:.2f}")
            continue
        cells = [row["layer"], row["level"], row["cell_px"], *(f"{p[key]:.2f}" for key in ("50", "90", "95", "99"))]
        cells += [f"{p['100']:.1f}", f"{row['percentiles_image_px']['95']:.0f}"]
        cells += [f"{row[f'within_{window}_px']:.1%}" for window in (4, 8, 16)]
        total = sum(other["weight"] for other in rows if other["head"] is None and other["layer"] == row["layer"])
        cells += [f"{row['outside']:.1%}", f"{row['weight'] / total:.1%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    by_head += [f"| {layer} | {level} | " + " | ".join(cells) + " |" for (layer, level), cells in of_heads.items()]
    return "\n".join(
        [
            "Distance of a sample from what its query looks at: the larger of |x| and |y|, in cells of the level it is "
            "on. Outside: samples beyond the padded level. Attention: the level's share of the weights.",
            "",
            *lines,
            "",
            "95th percentile by head, in cells:",
            "",
            *by_head,
        ]
    )


def _describe(counts: Tensor, weights: Tensor, num_outside: int) -> dict[str, Any]:
    """Numbers of one histogram (_NUM_BINS,)."""
    total = int(counts.sum())
    cumulative = counts.cumsum(0)
    percentiles = {}
    for percentile in PERCENTILES:
        # the first bin that holds this many samples
        needed = max(1, -(-total * percentile // 100))
        percentiles[str(percentile)] = (int((cumulative < needed).sum()) + 1) * _BIN_PX
    described: dict[str, Any] = {
        "num_samples": total,
        "percentiles_px": percentiles,
        "outside": num_outside / total,
        "weight": float(weights.sum()),
    }
    for window in WINDOWS_PX:
        last = round(window / _BIN_PX)
        described[f"within_{window}_px"] = float(counts[:last].sum()) / total
        described[f"weight_within_{window}_px"] = float(weights[:last].sum() / weights.sum().clamp(min=1e-12))
    return described
