"""Peak memory of the operator's forward and backward pass against plain PyTorch.

The library's documentation claims 71% less for its CUDA kernels and 88% less for its Triton kernels with a native
accumulator. Rows are `detr.benchmark.ops.row.OpRow`s without times.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.findings.report import number, table
from detr.benchmark.ops.report import PLAIN
from detr.benchmark.ops.row import OpRow
from detr.benchmark.origin import Origin

# (backend, accumulator) -> the saving that is claimed for the library's kernel of this kind
CLAIMED_SAVINGS = {("cuda", "float32"): 0.71, ("triton", "native"): 0.88}


def saving(row: OpRow, rows: Sequence[OpRow]) -> float | None:
    """How much less than grid_sample of the same workload, in [0, 1); None without a number of both."""
    plain = next((r for r in rows if r.backend == PLAIN and r.workload == row.workload), None)
    if row.backend == PLAIN or row.peak_mib is None or plain is None or plain.peak_mib is None:
        return None
    return 1 - row.peak_mib / plain.peak_mib


def verdict(rows: Sequence[OpRow]) -> str:
    """One line on the claims: the least saving over all workloads against what is claimed."""
    parts, kept = [], []
    for (backend, accumulator), claimed in CLAIMED_SAVINGS.items():
        same = [saving(row, rows) for row in rows if (row.backend, row.accumulator) == (backend, accumulator)]
        savings = [value for value in same if value is not None]
        if not savings:
            return "open: a row is missing"
        parts.append(f"{backend} {accumulator} {min(savings):.0%} to {max(savings):.0%} less, claimed {claimed:.0%}")
        kept.append(min(savings) >= claimed)
    return f"{'reproduced' if all(kept) else 'different'}: {'; '.join(parts)}"


def markdown(rows: Sequence[OpRow], origin: Origin) -> str:
    """The report."""
    lines = [*origin.lines(), "", f"Verdict: {verdict(rows)}."]
    for workload in dict.fromkeys(row.workload for row in rows):
        same = [row for row in rows if row.workload == workload]
        lines += ["", f"## {workload[0]}, {workload[1]} images, {workload[3]}", ""]
        cells = [
            (
                row.name,
                number(row.peak_mib, ".1f") if row.status == "ok" else row.status,
                number(saving(row, rows), ".1%"),
                number(row.peak_mib and row.peak_mib / row.batch_size, ".1f"),
                {True: "passed", False: "failed", None: "baseline"}[row.verified],
            )
            for row in same
        ]
        lines += table(("backend", "peak MiB", "less than grid_sample", "MiB an image", "parity"), cells)
    lines += ["", "The allocator's peak over forward and backward above the inputs; gradients are part of it.", ""]
    return "\n".join(lines)


def plot(rows: Sequence[OpRow], path: Path, *, title: str) -> None:
    """MiB an image, a group of bars a backend."""
    figure = Figure(figsize=(9, 0.3 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    good = [row for row in rows if row.peak_mib is not None]
    names = [f"{row.name} N={row.batch_size} {row.dtype}" for row in good]
    bars = axes.barh(names, [(row.peak_mib or 0) / row.batch_size for row in good], color="#4c78a8")
    axes.bar_label(bars, fmt=" %.0f", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("peak of forward + backward, MiB an image")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
