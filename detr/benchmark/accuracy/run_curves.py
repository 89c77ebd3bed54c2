"""Loss and AP of several runs beside each other, over steps or over minutes of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.accuracy.row import AccuracyRow
from detr.telemetry.loggers import read_metrics

Axis = Literal["step", "minutes"]

# a run looks at the clock when it logs, so its evaluation of minute 5 comes a little after it: this much goes unsaid,
# and what is further off than the second number is not of that minute
UNSAID_SHARE = 0.03
NEAR_SHARE = 0.3


@dataclass(frozen=True)
class RunCurve:
    """What a run logged.

    Attributes:
        label: Of the run.
        group: Runs of one group share a colour and an entry in the legend.
        steps: Of the logs.
        minutes: Of training, likewise.
        losses: Means since the log before.
        eval_steps: Of the evaluations.
        eval_minutes: Likewise.
        aps: Average precision.
    """

    label: str
    group: str
    steps: tuple[int, ...]
    minutes: tuple[float, ...]
    losses: tuple[float, ...]
    eval_steps: tuple[int, ...]
    eval_minutes: tuple[float, ...]
    aps: tuple[float, ...]

    def ap_at(self, minutes: float) -> tuple[float, float] | None:
        """The evaluation nearest to so many minutes, as (minutes, AP); None if all are more than 30% off.

        Not the last before: a slow run looks at the clock less often, and would show what it knew a minute earlier.
        """
        evaluations = zip(self.eval_minutes, self.aps, strict=True)
        nearest = min(evaluations, key=lambda pair: abs(pair[0] - minutes), default=None)
        return nearest if nearest is not None and abs(nearest[0] - minutes) <= NEAR_SHARE * minutes else None


def read_run_curve(folder: Path, *, label: str | None = None, group: str | None = None) -> RunCurve:
    """The curves of the run in `folder`.

    Raises:
        FileNotFoundError: It has no metrics.jsonl.
        ValueError: The log is damaged, or was written before logs held minutes.
    """
    log = folder / "metrics.jsonl"
    if not log.is_file():
        raise FileNotFoundError(f"runs={folder}: there is no {log}; give folders of tools/train.py")
    rows = read_metrics(log)
    if any("train/minutes" not in row for row in rows):
        raise ValueError(
            f"{log} does not say how long the run had trained; it is of an older version. "
            "Plots over minutes need a new run"
        )
    for row in rows:
        for key in ("train/minutes", "train/loss", "val/AP"):
            # a value that was not finite is null; minutes always are
            if type(row.get(key)) not in (int, float) and (row.get(key) is not None or key == "train/minutes"):
                raise ValueError(f"{log} is damaged: {key} of step {row['step']} is {row[key]!r}, which is no number")
    logs = [row for row in rows if row.get("train/loss") is not None]
    evaluations = [row for row in rows if row.get("val/AP") is not None]
    label = folder.name if label is None else label
    return RunCurve(
        label=label,
        group=label if group is None else group,
        steps=tuple(row["step"] for row in logs),
        minutes=tuple(row["train/minutes"] for row in logs),
        losses=tuple(row["train/loss"] for row in logs),
        eval_steps=tuple(row["step"] for row in evaluations),
        eval_minutes=tuple(row["train/minutes"] for row in evaluations),
        aps=tuple(row["val/AP"] for row in evaluations),
    )


def read_row_curves(rows: Sequence[AccuracyRow]) -> tuple[list[RunCurve], dict[str, str]]:
    """The curves of a comparison's runs, and why others have none, by their folders.

    Rows may have come from another machine: a run whose folder is not here has neither.
    """
    curves, reasons = [], {}
    for row in rows:
        if row.folder is None or not Path(row.folder).is_dir():
            continue
        try:
            curve = read_run_curve(Path(row.folder), label=f"{row.name} {row.seed}", group=row.name)
        except (ValueError, OSError) as error:
            reasons[row.folder] = str(error)
        else:
            if curve.aps:
                curves.append(curve)
            else:
                reasons[row.folder] = "metrics.jsonl holds no evaluation, though the run has ended"
    return curves, reasons


def run_labels(folders: Sequence[Path]) -> dict[Path, str]:
    """What tells the folders apart: their names, with as many of the folders above as it takes.

    Raises:
        ValueError: A folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"runs={folder} is given twice; leave one of them out")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {folder: "/".join(path.parts[-depth:]) for folder, path in zip(folders, paths, strict=True)}


def plot_runs(curves: Sequence[RunCurve], path: Path, *, x: Axis, title: str) -> None:
    """Loss above, AP below; one colour a group. Where all evaluations share one x, AP has a column a group instead."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    by_step = x == "step"
    groups = list(dict.fromkeys(curve.group for curve in curves))
    eval_xs = [curve.eval_steps if by_step else curve.eval_minutes for curve in curves]
    # the points of all groups would lie on each other
    by_group = len(groups) > 1 and len({place for xs in eval_xs for place in xs}) == 1
    losses, aps = figure.subplots(2, 1, sharex=not by_group)
    palette = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    named: set[str] = set()
    for curve, xs in zip(curves, eval_xs, strict=True):
        index = groups.index(curve.group)
        color = palette(index)
        label = None if curve.group in named else curve.group
        named.add(curve.group)
        losses.plot(curve.steps if by_step else curve.minutes, curve.losses, color=color, linewidth=0.9, label=label)
        places = [index] * len(xs) if by_group else xs
        aps.plot(places, curve.aps, color=color, linewidth=0.9, marker="o", ms=3)
    losses.set_ylabel("training loss")
    losses.set_yscale("log")
    losses.set_title(title)
    if curves:
        losses.legend(fontsize=8)
    aps.set_ylabel("AP (validation)")
    timed = losses if by_group else aps
    timed.set_xlabel("optimizer step" if by_step else "minutes of training, evaluations left out")
    if by_group:
        aps.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    for panel in (losses, aps):
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def format_ap_table(curves: Sequence[RunCurve], minutes: Sequence[float]) -> str:
    """AP after so many minutes of training, as Markdown; empty where a run was not evaluated near them.

    The minute of an evaluation stands beside it where it is more than 3% off.
    """
    lines = [
        "| " + " | ".join(["run", *(f"AP after {minute:g} min" for minute in minutes), "last AP | minutes | steps |"]),
        "|" + "---|" * (len(minutes) + 4),
    ]
    for curve in curves:
        values = [curve.ap_at(minute) if curve.minutes and curve.minutes[-1] >= minute else None for minute in minutes]
        cells = [_cell(value, minute) for value, minute in zip(values, minutes, strict=True)]
        last = f"{curve.aps[-1]:.3f}" if curve.aps else ""
        trained = f"{curve.minutes[-1]:.1f} | {curve.steps[-1]}" if curve.steps else "|"
        lines.append("| " + " | ".join([curve.label.replace("|", "/"), *cells, last, f"{trained} |"]))
    return "\n".join(lines)


def _cell(evaluation: tuple[float, float] | None, asked: float) -> str:
    if evaluation is None:
        return ""
    minutes, ap = evaluation
    return f"{ap:.3f}" if abs(minutes - asked) <= UNSAID_SHARE * asked else f"{ap:.3f} (at {minutes:.1f})"
