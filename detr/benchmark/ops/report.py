"""An operator benchmark as a table and a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.ops.row import OpRow
from detr.benchmark.origin import Origin

PEER, PLAIN = "deformops", "grid_sample"


def markdown_report(rows: Sequence[OpRow], origin: Origin) -> str:
    """A table a workload, with ratios to the peer in the same accumulator and to eager grid_sample."""
    lines = origin.lines()
    for workload in dict.fromkeys(row.workload for row in rows):
        case, batch_size, noise_px, dtype = workload
        spread = f", offsets +- {noise_px:g} px" if case == "encoder" else ""
        same = [row for row in rows if row.workload == workload]
        lines += ["", f"## {case}, {batch_size} images, {dtype}{spread}", "", *_table(same)]
    lines += [
        "",
        "Medians of CUDA events, 20th and 80th percentiles in brackets; inputs rotate past the L2. forward is under "
        "no_grad. GB/s are the compulsory bytes, each input read and each result written once. Peak is what the "
        "allocator held above the inputs over forward and backward. Errors are relative norms against float64 on the "
        "first image (locations: float32 pixel coordinates next to a cell centre fall on its other side, which is a "
        "jump of the true gradient). Ratios are time over the other's time in the same run: x peer is deformops with "
        "the same accumulator, x grid_sample how many times faster than it. host us: until a forward call with "
        "gradients returns to Python, the best round. Kernels met their error bound before they were timed.",
        "",
    ]
    return "\n".join(lines)


def plot_report(rows: Sequence[OpRow], path: Path, *, title: str) -> None:
    """Forward and backward milliseconds an image, one panel a workload."""
    good = [row for row in rows if row.status == "ok"]
    workloads = list(dict.fromkeys(row.workload for row in good))
    if not workloads:
        return
    figure = Figure(figsize=(9, 2.4 * len(workloads) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(workloads), squeeze=False)[:, 0]
    for axes, workload in zip(panels, workloads, strict=True):
        same = [row for row in good if row.workload == workload]
        images = workload[1]
        totals = {row: ((row.forward_ms or 0) + (row.backward_ms or 0)) / images for row in same}
        # eager grid_sample is several times longer than the rest: its bar leaves the panel, its numbers stay
        width = 1.35 * max(
            (total for row, total in totals.items() if row.backend != PLAIN), default=max(totals.values())
        )
        for index, row in enumerate(reversed(same)):
            forward, backward = (row.forward_ms or 0) / images, (row.backward_ms or 0) / images
            axes.barh(index, forward, color="#4c78a8", label="forward" if index == 0 else None)
            axes.barh(index, backward, left=forward, color="#f58518", label="backward" if index == 0 else None)
            place = min(totals[row], 0.78 * width)
            axes.annotate(f" {forward:.3f} + {backward:.3f}", (place, index), va="center", fontsize=8)
        axes.set_yticks(range(len(same)), [row.name for row in reversed(same)], fontsize=8)
        axes.set_xlim(0, width)
        axes.set_title(f"{workload[0]}, {images} images, {workload[3]}", fontsize=9)
        axes.set_xlabel("ms an image", fontsize=8)
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def plot_spread(rows: Sequence[OpRow], path: Path, *, title: str) -> None:
    """Milliseconds an image against the spread of the encoder's offsets, forward and backward."""
    good = [row for row in rows if row.status == "ok" and row.forward_ms is not None and row.backward_ms is not None]
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    spreads = sorted({row.noise_px for row in good})
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, name, times_ms in (
        (panels[0], "forward", {row: row.forward_ms or 0 for row in good}),
        (panels[1], "backward", {row: row.backward_ms or 0 for row in good}),
    ):
        for line in dict.fromkeys((row.name, row.dtype) for row in good):
            points = sorted(
                (row.noise_px, ms / row.batch_size) for row, ms in times_ms.items() if (row.name, row.dtype) == line
            )
            # the peer dashed, a colour a dtype
            style = "o--" if line[0].startswith(PEER) else "o-"
            colour = "#f58518" if line[1] == "fp32" else "#4c78a8"
            axes.plot(*zip(*points, strict=True), style, color=colour, label=" ".join(line))
        axes.set_xscale("log")
        axes.set_xticks(spreads, [f"{spread:g}" for spread in spreads])
        axes.minorticks_off()
        axes.set_xlabel("spread of the offsets, px")
        axes.set_ylabel(f"{name}, ms an image")
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _table(rows: Sequence[OpRow]) -> list[str]:
    header = ["backend", "forward ms", "with grad", "backward ms", "x peer fwd", "x peer bwd", "x grid_sample fwd"]
    header += ["x grid_sample bwd", "peak MiB", "fwd GB/s", "bwd GB/s", "host us"]
    header += ["err output", "err grad value", "err grad loc", "err grad weights", "parity"]
    lines = [_line(header), _line(["---"] * len(header))]
    plain = next((row for row in rows if row.backend == PLAIN and row.status == "ok"), None)
    for row in rows:
        if row.status != "ok":
            lines.append(_line([row.name, row.status, *[""] * (len(header) - 2)]))
            continue
        peer = next(
            (r for r in rows if r.backend == PEER and r.accumulator == row.accumulator and r.status == "ok"), None
        )
        cells = [
            row.name,
            f"{row.forward_ms:.4f} [{row.forward_p20_ms:.4f}, {row.forward_p80_ms:.4f}]",
            f"{row.forward_grad_ms:.4f}",
            f"{row.backward_ms:.4f} [{row.backward_p20_ms:.4f}, {row.backward_p80_ms:.4f}]",
            _ratio(row.forward_ms, peer.forward_ms if peer else None),
            _ratio(row.backward_ms, peer.backward_ms if peer else None),
            _ratio(plain.forward_ms if plain else None, row.forward_ms, digits=1),
            _ratio(plain.backward_ms if plain else None, row.backward_ms, digits=1),
            f"{row.peak_mib:.0f}",
            f"{row.forward_gbps:.0f}",
            f"{row.backward_gbps:.0f}",
            "" if row.host_forward_us is None else f"{row.host_forward_us:.0f}",
            f"{row.error_output:.1e}",
            f"{row.error_grad_value:.1e}",
            f"{row.error_grad_locations:.1e}",
            f"{row.error_grad_weights:.1e}",
            {True: "passed", False: "failed", None: "baseline"}[row.verified],
        ]
        lines.append(_line(cells))
    return lines


def _ratio(a: float | None, b: float | None, *, digits: int = 2) -> str:
    return f"{a / b:.{digits}f}" if a and b else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
