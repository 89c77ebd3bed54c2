"""The NPU paper's claims as tables, verdicts and a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.findings.npu_claims import CLAIMED, TechniqueRow, ratios
from detr.benchmark.findings.report import number, table
from detr.benchmark.ops.report import PLAIN
from detr.benchmark.ops.row import OpRow
from detr.benchmark.origin import Origin

VENDOR = "Its 1.9x / 2.4x / 2.0x over the vendor's library cannot be measured without an NPU."
# closer to its base than this a technique changes nothing
_NEGLIGIBLE = 0.02


def ratio_verdict(rows: Sequence[OpRow]) -> str:
    """One line on the ratios, the least over all workloads of the `cuda` kernel."""
    found = []
    for row in rows:
        plain = _plain_of(row, rows)
        if row.backend == "cuda" and plain is not None:
            found.append(ratios(row, plain))
    known = [value for value in found if value is not None]
    if not known or len(known) < len(found):
        return "open: a row is missing"
    forward, backward, total = (min(getattr(r, name) for r in known) for name in ("forward", "backward", "total"))
    kept = forward >= CLAIMED.forward and backward >= CLAIMED.backward and total >= CLAIMED.total
    return (
        f"{'reproduced' if kept else 'different'}: cuda is at least {forward:.1f}x / {backward:.1f}x / {total:.1f}x "
        f"faster than grid_sample (forward / backward / both), claimed "
        f"{CLAIMED.forward}x / {CLAIMED.backward}x / {CLAIMED.total}x"
    )


def of_base(row: TechniqueRow, rows: Sequence[TechniqueRow]) -> float | None:
    """Kernel time over that of what the row is compared with; None for the base itself."""
    if row.technique == row.base:
        return None
    base = next(
        (
            other
            for other in rows
            if (other.direction, other.dtype, other.batch_size, other.technique)
            == (row.direction, row.dtype, row.batch_size, row.base)
        ),
        None,
    )
    if base is None or not base.kernel_ms or row.kernel_ms is None:
        return None
    return row.kernel_ms / base.kernel_ms


def technique_verdicts(rows: Sequence[TechniqueRow]) -> list[str]:
    """A line a technique and direction: whether it carries over to this GPU."""
    lines = []
    for direction, technique in dict.fromkeys((row.direction, row.technique) for row in rows):
        same = [row for row in rows if (row.direction, row.technique) == (direction, technique)]
        if all(row.technique == row.base for row in same):
            continue
        found = {row.dtype: of_base(row, rows) for row in same}
        known = [value for value in found.values() if value is not None]
        if len(known) < len(found):
            lines.append(f"{direction} {technique}: open")
            continue
        if max(known) < 1 - _NEGLIGIBLE:
            word = "carries over"
        elif min(known) > 1 + _NEGLIGIBLE:
            word = "costs time"
        elif max(known) <= 1 + _NEGLIGIBLE and min(known) >= 1 - _NEGLIGIBLE:
            word = "changes nothing"
        else:
            word = "depends on the dtype"
        times = ", ".join(f"{dtype} {value:.2f}x" for dtype, value in found.items())
        lines.append(f"{direction} {technique}: {word} ({times} the time of {same[0].base})")
    return lines


def markdown(rows: Sequence[OpRow], techniques: Sequence[TechniqueRow], origin: Origin) -> str:
    """The report."""
    lines = [*origin.lines(), "", f"Verdict on the ratios: {ratio_verdict(rows)}.", "", VENDOR]
    for workload in dict.fromkeys(row.workload for row in rows):
        same = [row for row in rows if row.workload == workload]
        header = ["backend", "forward ms", "backward ms", "x grid_sample forward", "backward", "both", "parity"]
        lines += ["", f"## {workload[0]}, {workload[1]} images, {workload[3]}", ""]
        lines += table(header, [_ratio_cells(row, rows) for row in same])
        claimed = f"{CLAIMED.forward}x / {CLAIMED.backward}x / {CLAIMED.total}x"
        lines += ["", f"The paper's, on an NPU: {claimed}, the last in end-to-end training."]
    lines += ["", "## Techniques, one by one", ""]
    lines += [f"- {line}" for line in technique_verdicts(techniques)]
    header = ["direction", "dtype", "technique", "kernel ms", "of its base", "base", "layout ms", "parity"]
    lines += ["", *table(header, [_technique_cells(row, techniques) for row in techniques])]
    lines += [
        "",
        "Medians, 20th and 80th percentiles in brackets. Both: forward with gradients recorded, and backward. "
        "Techniques are in experiment kernels, not in those above: head_major is (N, M, S, D), pair one access for two "
        "corners side by side, padded a border of zeros instead of a question at each corner, staged the coarsest "
        "levels in shared memory, staggered each query beginning with another point. Backward: the value gradient, in "
        "float32 atomics. Layout: bringing values into the layout, or sums out of it and into the dtype of value.",
        "",
    ]
    return "\n".join(lines)


def plot(techniques: Sequence[TechniqueRow], path: Path, *, title: str) -> None:
    """Kernel times, a bar a technique."""
    good = [row for row in techniques if row.kernel_ms is not None]
    figure = Figure(figsize=(9, 0.3 * max(len(good), 1) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [f"{row.direction} {row.dtype} {row.technique}" for row in good]
    kernel = [row.kernel_ms or 0 for row in good]
    axes.barh(range(len(good)), kernel, color="#4c78a8", label="kernel")
    layout = [row.layout_ms or 0 for row in good]
    axes.barh(range(len(good)), layout, left=kernel, color="#bab0ac", label="layout")
    axes.set_yticks(range(len(good)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _plain_of(row: OpRow, rows: Sequence[OpRow]) -> OpRow | None:
    return next((other for other in rows if other.backend == PLAIN and other.workload == row.workload), None)


def _ratio_cells(row: OpRow, rows: Sequence[OpRow]) -> list[str]:
    if row.status != "ok":
        return [row.name, row.status]
    plain = _plain_of(row, rows)
    found = None if plain is None or row.backend == PLAIN else ratios(row, plain)
    cells = [row.name, number(row.forward_ms), number(row.backward_ms)]
    cells += [number(getattr(found, name, None), ".1f") for name in ("forward", "backward", "total")]
    return [*cells, {True: "passed", False: "failed", None: "baseline"}[row.verified]]


def _technique_cells(row: TechniqueRow, rows: Sequence[TechniqueRow]) -> list[str]:
    if row.kernel_ms is None:
        return [row.direction, row.dtype, row.technique, row.status]
    time = f"{row.kernel_ms:.4f} [{number(row.kernel_p20_ms)}, {number(row.kernel_p80_ms)}]"
    ratio = number(of_base(row, rows), ".2f")
    parity = "passed" if row.verified else "failed"
    base = row.base if ratio else ""
    return [row.direction, row.dtype, row.technique, time, ratio, base, number(row.layout_ms), parity]
