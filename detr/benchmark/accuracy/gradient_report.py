"""Distances of gradients from float64 over the checkpoints of a run: a table and a plot."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.accuracy.gradients import Distance

# more configurations than colors
_MARKERS = "os^v<>DPX*hd+"


@dataclass(frozen=True)
class GradientRow:
    """A configuration at a checkpoint.

    Attributes:
        step: Of the checkpoint.
        name: Of the configuration.
        loss: Of the batch; None where it failed.
        exact_loss: In float64; of a pair ("A from B"), that of B.
        distances: Of its gradients; none where it failed.
        status: ok, or why there are no numbers.
    """

    step: int
    name: str
    loss: float | None
    exact_loss: float
    distances: tuple[Distance, ...]
    status: str = "ok"


def gradient_table(rows: Sequence[GradientRow]) -> str:
    """Relative errors, one line a configuration and quantity, one column a checkpoint."""
    steps = sorted({row.step for row in rows})
    found = {(row.name, distance.quantity, row.step): distance for row in rows for distance in row.distances}
    lines = ["| gradient of | configuration | " + " | ".join(f"step {step}" for step in steps) + " | least cosine |"]
    lines.append("|" + "---|" * (len(steps) + 3))
    names = list(dict.fromkeys(row.name for row in rows))
    quantities = list(dict.fromkeys(quantity for _, quantity, _ in found))
    for quantity in quantities:
        for name in names:
            at_steps = [found.get((name, quantity, step)) for step in steps]
            known = [distance for distance in at_steps if distance is not None]
            if known:
                cells = ["" if distance is None else f"{distance.error:.1e}" for distance in at_steps]
                least = min(distance.cosine for distance in known)
                lines.append(f"| {quantity} | {name} | " + " | ".join(cells) + f" | {least:.6f} |")
    failed = [f"| {row.name} | {row.step} | {row.status.replace('|', '/')} |" for row in rows if row.status != "ok"]
    if failed:
        lines += ["", "| configuration without numbers | step | reason |", "|---|---|---|", *failed]
    return "\n".join(lines)


def gradient_values(rows: Sequence[GradientRow]) -> list[dict[str, Any]]:
    """The rows as plain values for JSON; what is not finite, as of a float16 gradient that overflowed, is None."""
    values = [dataclasses.asdict(row) for row in rows]
    for row in values:
        row["loss"] = _finite(row["loss"])
        row["distances"] = [{name: _finite(value) for name, value in found.items()} for found in row["distances"]]
    return values


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_gradients(rows: Sequence[GradientRow], path: Path, *, title: str) -> None:
    """Relative error over steps, a panel a quantity; dashed: one configuration from another.

    No error, and one that is not finite, is not drawn.
    """
    quantities = list(dict.fromkeys(distance.quantity for row in rows for distance in row.distances))
    num_columns = 3
    num_rows = max(1, -(-len(quantities) // num_columns))
    figure = Figure(figsize=(4 * num_columns, 2.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, sharex=True, squeeze=False).flatten()
    names = list(dict.fromkeys(row.name for row in rows))
    for panel, quantity in zip(panels, quantities, strict=False):
        for index, name in enumerate(names):
            points = [
                (row.step, distance.error)
                for row in rows
                if row.name == name
                for distance in row.distances
                if distance.quantity == quantity
                # no place on a logarithmic axis
                and math.isfinite(distance.error)
                and distance.error > 0
            ]
            style = {"color": f"C{index % 10}", "marker": _MARKERS[index % len(_MARKERS)]}
            style["linestyle"] = "--" if " from " in name else "-"
            panel.plot(*zip(*points, strict=True), ms=4, linewidth=0.9, label=name, **style)
        panel.set_title(quantity, fontsize=9)
        if any(len(line.get_xdata()) for line in panel.get_lines()):
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    for panel in panels[len(quantities) :]:
        panel.set_axis_off()
    # the lowest of each column, also where the last row is not full
    for panel in panels[max(0, len(quantities) - num_columns) : len(quantities)]:
        panel.tick_params(labelbottom=True)
        panel.set_xlabel("optimizer step", fontsize=8)
    if quantities:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
