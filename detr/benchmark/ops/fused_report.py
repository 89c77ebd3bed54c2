"""The fused form's benchmark as a table and a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.ops.fused import FusedRow
from detr.benchmark.origin import Origin


def fused_markdown(rows: Sequence[FusedRow], origin: Origin) -> str:
    """A table a workload: time and memory of the eager forms over those of the fused one."""
    lines = origin.lines()
    header = ["form", "forward + backward ms", "fused is faster", "saved MiB", "fused saves of it"]
    header += ["saved without value MiB", "fused saves of it", "peak MiB", "parity"]
    for workload in dict.fromkeys(row.workload for row in rows):
        batch_size, dtype, backend = workload
        same = [row for row in rows if row.workload == workload]
        fused = next((row for row in same if row.form == "fused" and row.status == "ok"), None)
        lines += ["", f"## {backend}, {batch_size} images, {dtype}", "", _line(header), _line(["---"] * len(header))]
        lines += [_line(_cells(row, fused, len(header))) for row in same]
    lines += [
        "",
        "An encoder's call, gradients of value, offsets and logits. `eager`: softmax and sampling locations in "
        "PyTorch, both float32 as autocast has them, before the same kernels; `eager_cast`: weights cast to the dtype "
        "of value besides, which other implementations need; `eager_deformops`: that before the kernels of deformops. "
        "Saved is what autograd keeps from forward to backward, each storage once (saved_tensors_hooks); percentages "
        "are what the fused form saves of the row's. Peak is what the allocator held above the inputs. Medians of CUDA "
        "events, 20th and 80th percentiles in brackets; inputs rotate past the L2. The fused form met its error bound "
        "before it was timed.",
        "",
    ]
    return "\n".join(lines)


def plot_fused(rows: Sequence[FusedRow], path: Path, *, title: str) -> None:
    """Forward and backward milliseconds an image, and what is saved, one panel each."""
    good = [row for row in rows if row.status == "ok" and row.step_ms is not None]
    if not good:
        return
    figure = Figure(figsize=(11, 0.32 * len(good) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True)
    names = [f"{row.backend} N={row.batch_size} {row.dtype} {row.form}" for row in good]
    colours = ["#4c78a8" if row.form == "fused" else "#bab0ac" for row in good]
    places = range(len(good))
    bars = times.barh(places, [(row.step_ms or 0) / row.batch_size for row in good], color=colours)
    times.bar_label(bars, fmt=" %.3f", fontsize=8)
    bars = memory.barh(places, [(row.saved_inputs_mib or 0) / row.batch_size for row in good], color=colours)
    memory.bar_label(bars, fmt=" %.1f", fontsize=8)
    times.set_yticks(places, names, fontsize=8)
    times.invert_yaxis()
    times.set_xlabel("forward + backward, ms an image", fontsize=8)
    memory.set_xlabel("saved for backward without value, MiB an image", fontsize=8)
    for axes in (times, memory):
        axes.margins(x=0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _cells(row: FusedRow, fused: FusedRow | None, num_cells: int) -> list[str]:
    if row.status != "ok":
        return [row.form, row.status, *[""] * (num_cells - 2)]
    is_eager = fused is not None and row.form != "fused"
    return [
        row.form,
        f"{row.step_ms:.3f} [{row.step_p20_ms:.3f}, {row.step_p80_ms:.3f}]",
        f"{_ratio(row.step_ms, fused.step_ms):.2f}x" if is_eager and fused else "",
        f"{row.saved_mib:.1f}",
        f"{_ratio(fused.saved_mib, row.saved_mib):.0%}" if is_eager and fused else "",
        f"{row.saved_inputs_mib:.1f}",
        f"{_ratio(fused.saved_inputs_mib, row.saved_inputs_mib):.0%}" if is_eager and fused else "",
        f"{row.peak_mib:.0f}",
        "baseline" if row.verified is None else "passed",
    ]


def _ratio(a: float | None, b: float | None) -> float:
    assert a is not None
    assert b
    return a / b


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
