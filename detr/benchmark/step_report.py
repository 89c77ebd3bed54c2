"""A step benchmark as a table and a picture."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.step_row import StepRow
from detr.benchmark.throughput import PHASES
from detr.telemetry.environment import format_environment


def markdown_report(rows: Sequence[StepRow], *, title: str, command: str, baseline: str) -> str:
    """A table of the rows' medians over their repeats, with ratios to `baseline`; failed rows keep their reason."""
    names = list(dict.fromkeys(row.name for row in rows))
    by_name = {name: [row for row in rows if row.name == name and row.status == "ok"] for name in names}
    base = _throughput(by_name.get(baseline, []))
    phases = [phase for phase in PHASES if any(phase in row.phases_ms for row in rows)]
    header = ["row", "kernel", "precision", "batch", "images/s", "spread", f"x {baseline}", "step ms"]
    header += [f"{phase} ms" for phase in phases] + ["MSDA share", "peak GiB", "parity"]
    lines = [f"# {title}", "", _setting(rows, command), "", _line(header), _line(["---"] * len(header))]
    for name in names:
        good = by_name[name]
        if not good:
            reason = next(row.status for row in rows if row.name == name)
            lines.append(_line([name, *[""] * 3, reason, *[""] * (len(header) - 5)]))
            continue
        speeds = [row.images_per_s for row in good if row.images_per_s is not None]
        first, speed = good[0], _throughput(good)
        cells = [
            name,
            f"{first.kernel} {first.accumulator}" + (" deterministic" if first.deterministic else ""),
            f"{first.precision}" + (" compiled" if first.compile else ""),
            str(first.batch_size),
            f"{speed:.2f}",
            f"{min(speeds):.2f} to {max(speeds):.2f}",
            f"{speed / base:.2f}" if base else "",
            f"{_median(row.step_ms for row in good):.1f}",
            *(f"{_median(row.phases_ms.get(phase) for row in good):.1f}" for phase in phases),
            f"{100 * _median(row.msda_share for row in good):.0f}%",
            f"{first.peak_gib:.1f}" if first.peak_gib is not None else "",
            {True: "passed", False: "unverified", None: ""}[first.verified],
        ]
        lines.append(_line(cells))
    lines += [
        "",
        "images/s is the median over fresh processes of batch over median step; spread is the least and most of "
        "them. Phases are timed in further steps with events around them, so their sum can exceed the step. "
        "Parity: the kernel met its error bound against float64 in the same process before it was timed.",
        "",
    ]
    return "\n".join(lines)


def plot_report(rows: Sequence[StepRow], path: Path, *, title: str) -> None:
    """Images per second of each row as bars, every repeat as a dot."""
    names = [
        name for name in dict.fromkeys(row.name for row in rows) if any(r.images_per_s for r in rows if r.name == name)
    ]
    figure = Figure(figsize=(8, 0.5 * len(names) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, name in enumerate(reversed(names)):
        speeds = [row.images_per_s for row in rows if row.name == name and row.images_per_s is not None]
        axes.barh(index, statistics.median(speeds), color="#4c78a8")
        axes.plot(speeds, [index] * len(speeds), "o", color="black", markersize=3)
        axes.annotate(f" {statistics.median(speeds):.1f}", (max(speeds), index), va="center")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("images/s, whole training step")
    axes.set_title(title)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def _setting(rows: Sequence[StepRow], command: str) -> str:
    good = next((row for row in rows if row.status == "ok"), None)
    if good is None:
        return f"`{command}`: no row could be measured."
    return (
        f"```\n$ {command}\n{format_environment(good.environment)}\n"
        f"{'date':<8}  {good.date}\n{'images':<8}  padded to {good.height}x{good.width}; whole step: forward, loss, "
        "backward, clip, optimizer\n```"
    )


def _throughput(rows: Sequence[StepRow]) -> float:
    return _median(row.images_per_s for row in rows) if rows else 0.0


def _median(values: Iterable[float | None]) -> float:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else float("nan")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
