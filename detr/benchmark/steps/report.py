"""A step benchmark as two tables and a picture."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.steps.row import StepRow
from detr.benchmark.steps.throughput import PHASES
from detr.telemetry.environment import format_environment

_READING = (
    "images/s: median over fresh processes of the images of all GPUs over the median step (over the mean step where "
    "data comes from a loader); spread: the least and most of them. Ratios are to the named row, for rows of the same "
    "batch a GPU. Mpx: an image with its padding. GiB: peak in tensors / held by the allocator, of the first GPU. "
    "Parity: the kernel met its error bound against float64 in the same process before it was timed. Recorded rows "
    "were measured elsewhere and are shown for comparison.\n\n"
    "Step, waiting for data included, and phases are medians; phases are timed in further steps with events around "
    "them, so their sum can exceed the step. Kernels: the sum of all kernels of a step in a profile, so the step minus "
    "this is time without work for the GPU. Host waits: in one step, for the device. Graphs: made by torch.compile, "
    "and of them during the timed steps, which should be 0. Row: wall seconds of the row's process, of them start and "
    "imports / gate and model / warm-up and compilation."
)


def markdown_report(
    rows: Sequence[StepRow], *, title: str, command: str, baselines: Sequence[str], picture: str
) -> str:
    """Tables of the rows' medians over their repeats, with ratios to `baselines`; failed rows keep their reason.

    Args:
        rows: All repeats of all rows, and those to compare with.
        title: Of the page.
        command: That made it.
        baselines: Names of rows; each gets a column of ratios.
        picture: Name of the plot, in the same folder.
    """
    names = list(dict.fromkeys(row.name for row in rows))
    good = {name: [row for row in rows if row.name == name and row.images_per_s is not None] for name in names}
    failed = [
        f"| {name} | {next(row.status for row in rows if row.name == name)} |" for name in names if not good[name]
    ]
    lines = [f"# {title}", "", _setting(rows, command)]
    if any(good.values()):
        lines += [
            "",
            f"![{title}]({picture})",
            "",
            "## Throughput",
            "",
            *_table(_throughput_columns(good, baselines), good),
        ]
        timed = {name: same for name, same in good.items() if same and same[0].status == "ok"}
        lines += ["", "## Where the time goes", "", *_table(_time_columns(timed), timed)]
    if failed:
        lines += ["", "## Rows without numbers", "", "| row | reason |", "| --- | --- |", *failed]
    return "\n".join([*lines, "", _READING, ""])


def kernel_report(rows: Sequence[StepRow]) -> str:
    """The longest kernels of each row, from its first repeat."""
    lines = ["# The longest kernels of a step", ""]
    for name in dict.fromkeys(row.name for row in rows if row.top_kernels_ms):
        row = next(row for row in rows if row.name == name and row.top_kernels_ms)
        lines += [
            f"## {name}",
            "",
            f"{row.num_kernels:.0f} kernels, {row.kernel_ms:.1f} ms a step.",
            "",
            "| kernel | ms a step |",
            "| --- | --- |",
            *(f"| `{kernel[:110]}` | {ms:.3f} |".replace("||", "\\|\\|") for kernel, ms in row.top_kernels_ms.items()),
            "",
        ]
    return "\n".join(lines)


def plot_report(rows: Sequence[StepRow], path: Path, *, title: str) -> None:
    """Images per second of each row as bars, every repeat as a dot; what was measured elsewhere is grey."""
    good = [row for row in rows if row.images_per_s is not None]
    names = list(dict.fromkeys(row.name for row in good))
    figure = Figure(figsize=(8, 0.4 * len(names) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, name in enumerate(reversed(names)):
        same = [row for row in good if row.name == name]
        speeds = [row.images_per_s for row in same if row.images_per_s is not None]
        axes.barh(index, statistics.median(speeds), color="#4c78a8" if same[0].status == "ok" else "#b0b0b0")
        if len(speeds) > 1:
            axes.plot(speeds, [index] * len(speeds), "o", color="black", markersize=3)
        axes.annotate(f" {statistics.median(speeds):.1f}", (max(speeds), index), va="center")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("images/s, whole training step" + (" (grey: recorded)" if _has_recorded(good) else ""))
    axes.set_title(title)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


Column = tuple[str, Callable[[Sequence[StepRow]], str]]


def _throughput_columns(good: dict[str, list[StepRow]], baselines: Sequence[str]) -> list[Column]:
    rows = [row for same in good.values() for row in same]
    columns: list[Column] = [
        ("model", lambda same: same[0].model or ""),
        ("kernel", _kernel),
        ("precision", lambda same: same[0].mode),
        ("batch", lambda same: f"{same[0].batch_size}" + (f" x {same[0].num_gpus}" if same[0].num_gpus > 1 else "")),
        ("data", _data),
        ("images/s", lambda same: f"{_speed(same):.2f}"),
        ("spread", _spread),
    ]
    columns += [(f"x {name}", _ratio_to(good[name])) for name in baselines if good.get(name)]
    if any(row.num_gpus > 1 for row in rows):
        columns.append(("scaling", lambda same: _scaling(same, rows)))
    columns += [("GiB", _memory), ("parity", _parity)]
    return columns


def _time_columns(timed: dict[str, list[StepRow]]) -> list[Column]:
    phases = [phase for phase in PHASES if any(phase in row.phases_ms for same in timed.values() for row in same)]

    def phase_ms(phase: str) -> Callable[[Sequence[StepRow]], str]:
        return lambda same: _number(row.phases_ms.get(phase) for row in same)

    return [
        ("step ms", lambda same: _number(row.step_ms for row in same)),
        (
            "20% to 80%",
            lambda same: f"{_number(r.step_ms_p20 for r in same)} to {_number(r.step_ms_p80 for r in same)}",
        ),
        *((f"{phase} ms", phase_ms(phase)) for phase in phases),
        ("kernels", lambda same: _number((row.num_kernels for row in same), ".0f")),
        ("kernel ms", lambda same: _number(row.kernel_ms for row in same)),
        ("MSDA forward ms", lambda same: _number((row.msda_forward_ms for row in same), ".2f")),
        ("MSDA backward ms", lambda same: _number((row.msda_backward_ms for row in same), ".2f")),
        ("MSDA share", lambda same: _number((row.msda_share for row in same), ".0%")),
        ("host waits", lambda same: _number((row.host_syncs for row in same), ".0f")),
        ("graphs", _graphs),
        ("row s", _spent),
    ]


def _table(columns: Sequence[Column], rows: dict[str, list[StepRow]]) -> list[str]:
    lines = [_line(["row", *(title for title, _ in columns)]), _line(["---"] * (1 + len(columns)))]
    return lines + [_line([name, *(cell(same) for _, cell in columns)]) for name, same in rows.items() if same]


def _setting(rows: Sequence[StepRow], command: str) -> str:
    good = next((row for row in rows if row.status == "ok"), None)
    if good is None:
        return f"`{command}`: no row could be measured."
    return (
        f"```\n$ {command}\n{format_environment(good.environment)}\n{'date':<8}  {good.date}\n"
        f"{'step':<8}  forward, loss, backward, clip, optimizer\n```"
    )


def _kernel(same: Sequence[StepRow]) -> str:
    row = same[0]
    return " ".join(
        word for word in (row.kernel, row.accumulator, "deterministic" if row.deterministic else None) if word
    )


def _data(same: Sequence[StepRow]) -> str:
    row = same[0]
    if row.data_source is None:
        return ""
    size = f"{row.height}x{row.width}" if row.height else f"{row.padded_mpx or 0:.2f} Mpx"
    workers = "" if row.num_workers is None else f" ({row.num_workers} workers)"
    return f"{row.data_source}{workers}, {size}"


def _speed(same: Sequence[StepRow]) -> float:
    return statistics.median(row.images_per_s for row in same if row.images_per_s is not None)


def _spread(same: Sequence[StepRow]) -> str:
    speeds = [row.images_per_s for row in same if row.images_per_s is not None]
    return f"{min(speeds):.2f} to {max(speeds):.2f}" if len(speeds) > 1 else ""


def _ratio_to(base: Sequence[StepRow]) -> Callable[[Sequence[StepRow]], str]:
    def ratio(same: Sequence[StepRow]) -> str:
        # images/s of another batch is another question
        return f"{_speed(same) / _speed(base):.2f}" if base[0].batch_size == same[0].batch_size else ""

    return ratio


def _scaling(same: Sequence[StepRow], rows: Sequence[StepRow]) -> str:
    """Speed over that of the same row on one GPU, and that over the number of GPUs."""
    alike = [
        "status",
        "model",
        "kernel",
        "accumulator",
        "deterministic",
        "precision",
        "compile",
        "cuda_graphs",
        "batch_size",
    ]
    alike += ["data_source", "height", "width"]
    one = [r for r in rows if r.num_gpus == 1 and all(getattr(r, key) == getattr(same[0], key) for key in alike)]
    if not one or same[0].num_gpus == 1:
        return ""
    ratio = _speed(same) / _speed(one)
    return f"{ratio:.2f}x ({ratio / same[0].num_gpus:.0%})"


def _step_spread(same: Sequence[StepRow]) -> str:
    low, high = _number(row.step_ms_p20 for row in same), _number(row.step_ms_p80 for row in same)
    return f"{low} to {high}" if low else ""


def _memory(same: Sequence[StepRow]) -> str:
    if same[0].peak_gib is None:
        return ""
    reserved = "" if same[0].reserved_gib is None else f" / {same[0].reserved_gib:.1f}"
    return f"{same[0].peak_gib:.1f}{reserved}"


def _parity(same: Sequence[StepRow]) -> str:
    if same[0].status != "ok":
        return same[0].status
    return {True: "passed", False: "unverified", None: ""}[same[0].verified]


def _graphs(same: Sequence[StepRow]) -> str:
    row = max(same, key=lambda row: row.num_recompiles or 0)
    if not row.num_graphs:
        return ""
    return f"{row.num_graphs}" + (f", **{row.num_recompiles} while timed**" if row.num_recompiles else "")


def _spent(same: Sequence[StepRow]) -> str:
    """Of the last repeat, which found what the first had compiled."""
    spent = same[-1].spent_s
    if not spent:
        return ""
    parts = " / ".join(f"{spent.get(part, 0):.0f}" for part in ("start", "build", "warmup"))
    return f"{sum(spent.values()):.0f}: {parts}"


def _has_recorded(rows: Sequence[StepRow]) -> bool:
    return any(row.status != "ok" for row in rows)


def _number(values: Iterable[float | None], form: str = ".1f") -> str:
    present = [value for value in values if value is not None]
    return f"{statistics.median(present):{form}}" if present else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
