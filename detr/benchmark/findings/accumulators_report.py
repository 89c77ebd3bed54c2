"""The accumulators as tables, a verdict and a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.findings.accumulators import EXPERIMENT, AccumulatorRow
from detr.benchmark.findings.report import number, table
from detr.benchmark.origin import Origin

# of float32's time: below this, emulation is no bottleneck
_BOTTLENECK = 1.5


def verdict(rows: Sequence[AccumulatorRow]) -> str:
    """One line on the claim: the experiment in an encoder, bf16, against its own float32 reductions."""
    same = [row for row in rows if (row.workload, row.dtype, row.kernel) == ("encoder", "bf16", EXPERIMENT)]
    times = {(row.accumulator, row.emulated): row.value_grad_ms for row in same}
    float32 = times.get(("float32", False))
    emulated, native = times.get(("native", True)), times.get(("native", False))
    if not (float32 and emulated and native):
        return "open: a row of the encoder in bf16 is missing"
    kept = emulated / float32 > _BOTTLENECK
    return (
        f"{'reproduced' if kept else 'refuted'}: emulated bf16 atomics take {emulated / float32:.2f}x the time of "
        f"float32's, the hardware's bf16 {native / float32:.2f}x"
    )


def markdown(rows: Sequence[AccumulatorRow], origin: Origin) -> str:
    """The report."""
    lines = [*origin.lines(), "", f"Verdict: {verdict(rows)}."]
    for place in dict.fromkeys(row.place for row in rows if row.num_cells is None):
        same = [row for row in rows if row.place == place]
        num_levels = max(len(row.level_errors) for row in same)
        header = ["sums", "value gradient ms", "of float32 atomics", "error", "parity"]
        header[4:4] = [f"error, level {level}" for level in range(num_levels)]
        lines += ["", f"## {place[0]}, {place[1]} images, {place[2]}", "", *table(header, _cells(same))]
    contention = [row for row in rows if row.num_cells is not None]
    for dtype in dict.fromkeys(row.dtype for row in contention):
        same = [row for row in contention if row.dtype == dtype]
        names = list(dict.fromkeys(row.name for row in same))
        cells = [
            [str(count), *(_contention_cell(same, name, count) for name in names)]
            for count in dict.fromkeys(row.num_cells for row in same)
        ]
        lines += ["", f"## Contention, {dtype}", "", *table(["cells", *names], cells)]
    lines += [
        "",
        "Milliseconds of the value gradient alone, clearing, adding and rounding: medians, 20th and 80th percentiles "
        "in brackets. Emulated: a compare-and-swap loop instead of the hardware's reduction. Errors are relative norms "
        "against float64 on the first image. Contention: 65,536 rows of 32 channels in 8 heads, all on so many cells "
        "of one map. Every row met its error bound first. The share in a training step is benchmark=accumulators of "
        "tools/benchmark.py.",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Sequence[AccumulatorRow], path: Path, *, title: str) -> None:
    """Encoder and decoder as bars, contention as lines."""
    bars = [row for row in rows if row.num_cells is None and row.value_grad_ms is not None]
    lines = [row for row in rows if row.num_cells is not None and row.value_grad_ms is not None]
    figure = Figure(figsize=(12, max(4.0, 0.28 * len(bars) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [f"{row.workload} {row.dtype} {row.name}" for row in bars]
    drawn = left.barh(range(len(bars)), [row.value_grad_ms or 0 for row in bars], color="#4c78a8")
    left.bar_label(drawn, fmt=" %.3f", fontsize=7)
    left.set_yticks(range(len(bars)), names, fontsize=7)
    left.invert_yaxis()
    left.set_xlabel("value gradient, ms")
    left.margins(x=0.15)
    for name, dtype in dict.fromkeys((row.name, row.dtype) for row in lines):
        points = sorted(
            (row.num_cells or 0, row.value_grad_ms or 0) for row in lines if (row.name, row.dtype) == (name, dtype)
        )
        right.plot(*zip(*points, strict=True), "o-", label=f"{dtype} {name}")
    if lines:
        right.set_xscale("log", base=2)
        right.set_yscale("log")
        right.invert_xaxis()
        right.legend(fontsize=7)
    right.set_xlabel("cells that all samples fall in")
    right.set_ylabel("value gradient, ms")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _cells(rows: Sequence[AccumulatorRow]) -> list[list[str]]:
    base = next(
        (r.value_grad_ms for r in rows if (r.kernel, r.accumulator, r.emulated) == (EXPERIMENT, "float32", False)), None
    )
    cells = []
    for row in rows:
        if row.value_grad_ms is None:
            cells.append([row.name, row.status])
            continue
        spread = f" [{number(row.value_grad_p20_ms)}, {number(row.value_grad_p80_ms)}]"
        of_base = number(row.value_grad_ms / base if base else None, ".2f")
        errors = [f"{error:.1e}" for error in row.level_errors]
        parity = "passed" if row.verified else "failed"
        cells.append([row.name, number(row.value_grad_ms) + spread, of_base, number(row.error, ".1e"), *errors, parity])
    return cells


def _contention_cell(rows: Sequence[AccumulatorRow], name: str, num_cells: int | None) -> str:
    row = next((row for row in rows if row.name == name and row.num_cells == num_cells), None)
    if row is None:
        return ""
    return row.status if row.value_grad_ms is None else number(row.value_grad_ms)
