"""The dispatch orders as tables, a verdict and a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.findings.dispatch_order import ALPHA, OrderRow
from detr.benchmark.findings.orders import ORDERS
from detr.benchmark.findings.report import table
from detr.benchmark.origin import Origin


def verdict(rows: Sequence[OrderRow]) -> str:
    """One line on the claim, for each kernel and direction."""
    parts, clean = [], True
    for kernel, direction in dict.fromkeys((row.kernel, row.direction) for row in rows):
        same = [row for row in rows if (row.kernel, row.direction) == (kernel, direction) and row.order != "linear"]
        compared = [row for row in same if row.ratio is not None]
        if len(compared) < len(same) or not compared:
            return f"open: {kernel} {direction} has orders without numbers"
        found = [row for row in compared if row.distinguishable]
        clean = clean and not found
        text = f"{kernel} {direction}: {len(found)} of {len(compared)} comparisons differ from linear"
        if found:
            slowest, fastest = max(found, key=_ratio), min(found, key=_ratio)
            text += (
                f", {_ratio(fastest):.3f}x ({fastest.order}) to {_ratio(slowest):.3f}x ({slowest.order}) of its time"
            )
        parts.append(text)
    return f"{'reproduced' if clean else 'different'}: {'; '.join(parts)}"


def markdown(rows: Sequence[OrderRow], origin: Origin) -> str:
    """The report: ratios to linear, those that are distinguishable in bold."""
    lines = [*origin.lines(), "", f"Verdict: {verdict(rows)}."]
    for kernel, direction, dtype in dict.fromkeys((row.kernel, row.direction, row.dtype) for row in rows):
        same = [row for row in rows if (row.kernel, row.direction, row.dtype) == (kernel, direction, dtype)]
        lines += ["", f"## {kernel}, {direction}, {dtype}, {same[0].batch_size} images", ""]
        cells = []
        for levels, points in dict.fromkeys((row.num_levels, row.num_points) for row in same):
            case = {row.order: row for row in same if (row.num_levels, row.num_points) == (levels, points)}
            linear = case["linear"]
            time = linear.status if linear.median_ms is None else f"{linear.median_ms:.4f}"
            cells.append([str(levels), str(points), time, *(_cell(case[order]) for order in ORDERS[1:])])
        lines += table(("levels", "points", "linear ms", *ORDERS[1:]), cells)
    lines += [
        "",
        "Medians over repeats of the time over linear's in the same repeat. Bold: different from linear at "
        f"{ALPHA:.0%} by Wilcoxon's signed-rank test with Holm's correction for all comparisons of this run. The "
        "queries of the shipped kernel are permuted before the clock starts; the point-parallel kernel takes the order "
        "as an argument. Every order met the error bound first.",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Sequence[OrderRow], path: Path, *, title: str) -> None:
    """Ratio to linear by case, a panel a kernel and direction, distinguishable ones filled."""
    good = [row for row in rows if row.ratio is not None]
    panels = list(dict.fromkeys((row.kernel, row.direction) for row in good))
    if not panels:
        return
    figure = Figure(figsize=(11, 2.8 * len(panels) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        same = [row for row in good if (row.kernel, row.direction) == panel]
        names = list(dict.fromkeys(f"L{row.num_levels} P{row.num_points}" for row in same))
        for index, order in enumerate(ORDERS[1:]):
            points = [row for row in same if row.order == order]
            places = [names.index(f"L{row.num_levels} P{row.num_points}") + 0.12 * (index - 2.5) for row in points]
            faces = [f"C{index}" if row.distinguishable else "none" for row in points]
            axes.scatter(places, [_ratio(row) for row in points], c=faces, edgecolors=f"C{index}", label=order, s=18)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel("time over linear's", fontsize=8)
        axes.set_title(" ".join(panel), fontsize=9)
        axes.legend(fontsize=7, ncols=6)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _cell(row: OrderRow) -> str:
    if row.ratio is None:
        return row.status
    return f"**{row.ratio:.3f}**" if row.distinguishable else f"{row.ratio:.3f}"


def _ratio(row: OrderRow) -> float:
    assert row.ratio is not None
    return row.ratio
