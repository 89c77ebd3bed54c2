"""The tilings as a table, a verdict and occupancy against throughput."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.findings.report import number, table
from detr.benchmark.findings.tiling import TilingRow
from detr.benchmark.origin import Origin

# the paper's two tilings on an A100: occupancy, share of the peak bandwidth; and how much faster the second is
CLAIM = "85% occupancy with 5.1% of the bandwidth, 17% with 36.1% and 7.4x faster, on an A100"
_LEAST_GAIN = 1.5


def verdict(rows: Sequence[TilingRow]) -> str:
    """One line on the claim: the point-parallel tiling of most occupancy against the fastest of several queries.

    Of each dtype and batch size by itself.
    """
    parts, kept = [], True
    for dtype, batch_size in dict.fromkeys((row.dtype, row.batch_size) for row in rows):
        case = f"{dtype}, {batch_size} images"
        same = [row for row in rows if (row.dtype, row.batch_size) == (dtype, batch_size)]
        good = [row for row in same if row.block_q is not None and row.forward_ms and row.occupancy is not None]
        points, blocks = [row for row in good if row.block_q == 1], [row for row in good if row.block_q != 1]
        if not points or not blocks:
            return f"open: no times of {case}"
        full, best = max(points, key=_occupancy), min(blocks, key=lambda row: row.forward_ms or 0)
        assert full.forward_ms
        assert best.forward_ms
        gain = full.forward_ms / best.forward_ms
        kept = kept and gain > _LEAST_GAIN and _occupancy(best) < _occupancy(full)
        measured = "achieved" if full.achieved_occupancy is not None else "theoretical"
        parts.append(
            f"{case}: {full.name} with {_occupancy(full):.0%} {measured} occupancy, {best.name} with "
            f"{_occupancy(best):.0%} and {gain:.1f}x faster"
        )
    if not parts:
        return "open: no times"
    return f"{'reproduced' if kept else 'different'}: {'; '.join(parts)}; claimed {CLAIM}"


def markdown(rows: Sequence[TilingRow], origin: Origin, *, counters: str) -> str:
    """The report.

    Args:
        counters: Where the columns of ncu come from, or why they are empty.
    """
    lines = [*origin.lines(), "", f"Verdict: {verdict(rows)}."]
    header = ["tiling", "forward ms", "registers", "shared B", "theoretical occupancy", "achieved occupancy"]
    header += ["compulsory GB/s", "of a copy", "DRAM GB/s", "of the peak", "L2 GB/s", "parity"]
    for dtype, batch_size in dict.fromkeys((row.dtype, row.batch_size) for row in rows):
        same = [row for row in rows if (row.dtype, row.batch_size) == (dtype, batch_size)]
        lines += ["", f"## {dtype}, {batch_size} images", "", *table(header, [_cells(row) for row in same])]
    lines += [
        "",
        "A tiling is queries x points at a time, and warps a program (w): a query with all 16 points is "
        "point-parallel, many queries with a point at a time query-block. Theoretical occupancy follows from registers "
        "and shared memory of the compiled kernel. Compulsory GB/s: each input read and each result written once; of a "
        f"copy: over the rate of a device copy in the same process. Achieved occupancy, DRAM and L2: {counters}. Each "
        "tiling met its error bound before it was timed.",
        "",
    ]
    return "\n".join(lines)


def plot(rows: Sequence[TilingRow], path: Path, *, title: str) -> None:
    """Throughput over occupancy, a point a tiling."""
    good = [row for row in rows if row.occupancy is not None and row.compulsory_gbps is not None]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, dtype in enumerate(dict.fromkeys(row.dtype for row in good)):
        same = [row for row in good if row.dtype == dtype]
        axes.scatter([_occupancy(r) for r in same], [r.compulsory_gbps or 0 for r in same], c=f"C{index}", label=dtype)
        for row in same:
            axes.annotate(f" {row.name}", (_occupancy(row), row.compulsory_gbps or 0), fontsize=7)
    known = all(row.achieved_occupancy is not None for row in good)
    axes.set_xlabel(f"{'achieved' if known else 'theoretical'} occupancy")
    axes.set_ylabel("compulsory GB/s")
    axes.set_xlim(0, 1.15)
    axes.set_ylim(bottom=0)
    if good:
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _cells(row: TilingRow) -> list[str]:
    time = row.status
    if row.forward_ms is not None:
        time = f"{row.forward_ms:.4f} [{number(row.forward_p20_ms)}, {number(row.forward_p80_ms)}]"
    return [
        row.name,
        time,
        number(row.registers, "d"),
        number(row.shared_bytes, "d"),
        number(row.theoretical_occupancy, ".0%"),
        number(row.achieved_occupancy, ".0%") or "not available",
        number(row.compulsory_gbps, ".0f"),
        number(row.copy_share, ".1%"),
        number(row.dram_gbps, ".0f") or "not available",
        number(row.dram_share, ".1%") or "not available",
        number(row.l2_gbps, ".0f") or "not available",
        {True: "passed", False: "failed", None: ""}[row.verified],
    ]


def _occupancy(row: TilingRow) -> float:
    assert row.occupancy is not None
    return row.occupancy
