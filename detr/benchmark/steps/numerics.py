"""Whether a fast step trains like the plain one: loss curves from one start, against the plain step's own noise.

All rows start from the same weights and see the same batches. What differs between the runs of the plain step is the
seed of what is random in a step (dropout), and on a GPU the order of atomic additions; how far they come apart is the
noise. An option agrees with the plain step if it stays within that.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from detr.benchmark.steps.row import StepRow
from detr.telemetry.environment import format_environment

# a deviation over 50 correlated steps scatters by about a quarter, so the largest of three is no limit by itself
NOISE_FACTOR = 1.5


@dataclass(frozen=True)
class Comparison:
    """A loss curve against the mean of the plain ones.

    Attributes:
        name: Of the row.
        first: Relative difference of the first step's loss: rounding, and dropout where masks differ.
        deviation: Root mean square over the steps of the difference, relative to the mean plain loss.
        bias: Mean difference over the last fifth of the steps, relative likewise; positive is a higher loss.
        is_within: Whether `deviation` is at most NOISE_FACTOR times the noise.
    """

    name: str
    first: float
    deviation: float
    bias: float
    is_within: bool


def noise_level(plain: Sequence[Sequence[float]]) -> float:
    """The largest deviation of one plain curve from the mean of the others.

    Args:
        plain: At least two curves of one length.

    Raises:
        ValueError: There is one curve only, or they differ in length.
    """
    if len(plain) < 2 or len({len(curve) for curve in plain}) != 1:
        raise ValueError(
            f"the noise needs two or more plain runs of one length; got lengths {[len(curve) for curve in plain]}"
        )
    return max(_deviation(curve, _mean([*plain[:index], *plain[index + 1 :]])) for index, curve in enumerate(plain))


def compare_curve(name: str, curve: Sequence[float], plain: Sequence[Sequence[float]]) -> Comparison:
    """`curve` against the mean of the `plain` ones; a loss that is not finite is never within the noise."""
    mean = _mean(plain)
    level = statistics.fmean(mean)
    tail = max(1, len(mean) // 5)
    deviation = _deviation(curve, mean)
    return Comparison(
        name=name,
        first=(curve[0] - mean[0]) / mean[0],
        deviation=deviation,
        bias=(statistics.fmean(curve[-tail:]) - statistics.fmean(mean[-tail:])) / level,
        is_within=math.isfinite(deviation) and deviation <= NOISE_FACTOR * noise_level(plain),
    )


def numerics_report(
    rows: Sequence[StepRow],
    *,
    plain_names: Sequence[str],
    notes: Mapping[str, str],
    title: str,
    command: str,
    picture: str,
) -> str:
    """A table of the options with their verdict; rows without a curve keep their reason.

    Args:
        rows: One or more repeats of every row.
        plain_names: The rows of the plain step, one a seed.
        notes: What is to be known of a row, such as that it changes the sampling.
        title: Of the page.
        command: That made it.
        picture: Name of the plot, in the same folder.
    """
    plain = _curves(rows, plain_names)
    lines = [f"# {title}", ""]
    good = next((row for row in rows if row.losses), None)
    if good is not None:
        lines += [
            f"```\n$ {command}\n{format_environment(good.environment)}\n{'date':<8}  {good.date}\n"
            f"{'step':<8}  {good.batch_size} images, {good.data_source}; {len(good.losses)} steps\n```",
            "",
            f"![{title}]({picture})",
            "",
        ]
    if len(plain) < 2:
        return "\n".join([*lines, "The plain step did not run twice, so its noise is not known.", *_failures(rows), ""])
    noise = noise_level(plain)
    lines += [
        f"Plain step: {', '.join(plain_names)}; {len(plain)} runs of the same weights and batches. Noise: "
        f"{100 * noise:.3f}% (largest root mean square deviation of one run from the mean of the others). Within: at "
        f"most {NOISE_FACTOR} times that.",
        "",
        "| row | kernel | precision | first step | deviation | x noise | last fifth | verdict | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if not row.losses:
            continue
        if row.name in plain_names:
            others = [other for other in plain if other is not row.losses]
            result, verdict = compare_curve(row.name, row.losses, others) if len(others) > 1 else None, "plain"
        else:
            result = compare_curve(row.name, row.losses, plain)
            verdict = "within noise" if result.is_within else "**outside**"
        lines.append(_line(row, result, noise, verdict, notes.get(row.name, "")))
    return "\n".join([*lines, *_failures(rows), ""])


def plot_numerics(rows: Sequence[StepRow], path: Path, *, plain_names: Sequence[str], title: str) -> None:
    """Losses above, and below each curve's difference from the plain mean over the range of the plain runs."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True)
    plain = _curves(rows, plain_names)
    if plain:
        mean = _mean(plain)
        steps = range(1, len(mean) + 1)
        spread = [[100 * (curve[i] / mean[i] - 1) for curve in plain] for i in range(len(mean))]
        differences.fill_between(
            steps, [min(s) for s in spread], [max(s) for s in spread], color="#c8c8c8", label="plain runs"
        )
        losses.plot(steps, mean, color="black", linewidth=2, label="plain, mean")
        for row in rows:
            if row.losses and row.name not in plain_names:
                losses.plot(steps, row.losses, linewidth=0.9, label=row.name)
                relative = [100 * (loss / m - 1) for loss, m in zip(row.losses, mean, strict=True)]
                differences.plot(steps, relative, linewidth=0.9, label=row.name)
        widest = max(abs(value) for values in spread for value in values)
        if widest > 0:
            # what leaves this panel is far outside, and must not hide the rest
            differences.set_ylim(-8 * widest, 8 * widest)
    losses.set_ylabel("loss")
    losses.legend(fontsize=8)
    differences.set_ylabel("difference from plain, %")
    differences.set_xlabel("step")
    differences.legend(fontsize=8)
    losses.set_title(title)
    figure.savefig(path, dpi=120)


def _curves(rows: Sequence[StepRow], names: Sequence[str]) -> list[tuple[float, ...]]:
    return [row.losses for row in rows if row.name in names and row.losses]


def _failures(rows: Sequence[StepRow]) -> list[str]:
    failed = [f"| {row.name} | {row.status} |" for row in rows if not row.losses]
    return ["", "| row | reason |", "| --- | --- |", *failed] if failed else []


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def _deviation(curve: Sequence[float], mean: Sequence[float]) -> float:
    squares = [(loss - m) ** 2 for loss, m in zip(curve, mean, strict=True)]
    return math.sqrt(statistics.fmean(squares)) / statistics.fmean(mean)


def _line(row: StepRow, result: Comparison | None, noise: float, verdict: str, note: str) -> str:
    cells = [row.name, f"{row.kernel} {row.accumulator}", row.mode]
    if result is None:
        cells += [""] * 4
    else:
        ratio = f"{result.deviation / noise:.2f}" if noise else ""
        cells += [f"{100 * result.first:+.4f}%", f"{100 * result.deviation:.3f}%", ratio, f"{100 * result.bias:+.3f}%"]
    return "| " + " | ".join([*cells, verdict, note]) + " |"
