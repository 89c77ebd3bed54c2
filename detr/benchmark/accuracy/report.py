"""The page of a comparison of accuracies: table, what it supports in words, and how it was made."""

import csv
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from detr.benchmark.accuracy.row import AccuracyRow
from detr.benchmark.accuracy.stats import AdditiveFit, Difference, difference_sentence, paired_difference
from detr.telemetry.environment import format_environment


def accuracy_report(
    rows: Sequence[AccuracyRow],
    *,
    names: Sequence[str],
    seeds: Sequence[int],
    base: str,
    notes: Mapping[str, str],
    title: str,
    command: str,
    picture: str,
    without_curve: Mapping[str, str],
) -> str:
    """Mean and spread of every configuration, its difference from the base, and what that supports.

    Args:
        rows: At most one a configuration and seed.
        names: Of the configurations, in the order of the table; those without rows stand as not yet run.
        seeds: That were asked for.
        base: What the others are compared with.
        notes: What is to be known of a configuration.
        title: Of the page.
        command: That made it.
        picture: Name of the plot, in the same folder.
        without_curve: Why the log of a run cannot be drawn, by its folder; its row, from when it ended, counts.
    """
    lines = [f"# {title}", "", f"```\n$ {command}"]
    good = next((row for row in rows if row.is_ok), None)
    if good is not None:
        commits = sorted({row.commit for row in rows if row.is_ok and row.commit})
        lines += [format_environment(good.environment), f"{'date':<8}  {good.date}"]
        lines += [f"{'commits':<8}  {', '.join(commits)}"] if len(commits) > 1 else []
    lines += ["```", ""]
    lines += [
        "AP of the last evaluation, not of the best one. Run: wall time with start and compilation, of the "
        "last process alone where a run was cut short.",
        "",
    ]
    aps = {name: _by_seed(rows, name) for name in names}
    fit = AdditiveFit(aps)
    lines += [
        f"| configuration | seeds | AP | spread | AP50 | best | loss | minus `{base}`, paired | pooled | images/s "
        "| training s | run s | skipped steps | note |",
        "|" + "---|" * 14,
    ]
    for name in names:
        paired = None if name == base else paired_difference(aps[name], aps[base])
        pooled = None if name == base else fit.difference(name, base)
        lines.append(_line(name, [row for row in rows if row.name == name], seeds, paired, pooled, notes.get(name, "")))
    lines += ["", *_findings(aps, fit, base), "", *_failures(rows)]
    lines += _undrawn(without_curve)
    return "\n".join([*lines, f"![{title}]({picture})", ""])


def write_accuracy_csv(rows: Sequence[AccuracyRow], path: Path) -> None:
    """All columns but the environment, with the commit in its place."""
    names = [field.name for field in dataclasses.fields(AccuracyRow) if field.name not in ("environment", "folder")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "commit"])
        for row in rows:
            values = [getattr(row, name) for name in names[:-1]]
            writer.writerow([*values, " ".join(row.overrides), row.commit])


def _by_seed(rows: Sequence[AccuracyRow], name: str) -> dict[int, float]:
    return {row.seed: row.AP for row in rows if row.name == name and row.AP is not None}


def _line(
    name: str,
    rows: Sequence[AccuracyRow],
    seeds: Sequence[int],
    paired: Difference | None,
    pooled: Difference | None,
    note: str,
) -> str:
    good = [row for row in rows if row.is_ok]
    if not good:
        return f"| {name} | 0 of {len(seeds)} | not yet run" + " |" * 11 + f" {note} |"
    aps = [row.AP for row in good if row.AP is not None]
    spread = f"{statistics.stdev(aps):.4f}" if len(aps) > 1 else ""
    cells = [
        name,
        f"{len(good)} of {len(seeds)}",
        f"{statistics.fmean(aps):.4f}",
        spread,
        _mean([row.AP50 for row in good], ".4f"),
        _mean([row.best_AP for row in good], ".4f"),
        _mean([row.loss for row in good], ".3f"),
        _interval(paired),
        _interval(pooled),
        _mean([row.images_per_s for row in good], ".0f"),
        _mean([row.train_s for row in good], ".0f"),
        _mean([row.wall_s for row in good], ".0f"),
        _mean([row.num_skipped for row in good], ".0f"),
        note,
    ]
    return "| " + " | ".join(cells) + " |"


def _findings(aps: Mapping[str, Mapping[int, float]], fit: AdditiveFit, base: str) -> list[str]:
    """Sentences that the numbers support."""
    others = [name for name in aps if name != base and aps[name]]
    compared = {name: fit.difference(name, base) for name in others}
    found = {name: difference for name, difference in compared.items() if difference is not None}
    if not found:
        return [
            "Too few runs to compare anything: a difference needs the base and another configuration with the same two "
            "seeds."
        ]
    finest = min(difference.half_width for difference in found.values())
    lines = [
        f"The noise of a run is {fit.deviation:.4f} AP (standard deviation, {fit.degrees} degrees of freedom, what a "
        f"seed does to all configurations taken out), so a difference of less than about {finest:.4f} AP cannot be "
        "seen here, whatever its cause. Spread: standard deviation over seeds. Paired: 95% interval from the "
        "differences of equal seeds alone; pooled: of the same differences, with the noise of all configurations, "
        "taken to be alike. The sentences use the pooled one.",
        "",
        *[f"- {difference_sentence(name, base, difference)}" for name, difference in found.items()],
    ]
    if len(found) > 1:
        lines += [
            "",
            f"{len(found)} comparisons at 95% each: where nothing differs, one of them is expected to look different "
            f"by chance in {100 * (1 - 0.95 ** len(found)):.0f}% of such tables (if they were independent).",
        ]
    return lines


def _failures(rows: Sequence[AccuracyRow]) -> list[str]:
    failed = [f"| {row.name} | {row.seed} | {row.status.replace('|', '/')} |" for row in rows if not row.is_ok]
    if not failed:
        return []
    advice = (
        "`retry_failed=true` tries them again. Where the folder of a run holds one of other settings, give another "
        "`output_dir=`."
    )
    return ["| run without numbers | seed | reason |", "|---|---|---|", *failed, "", advice, ""]


def _undrawn(reasons: Mapping[str, str]) -> list[str]:
    if not reasons:
        return []
    lines = [f"| {folder.replace('|', '/')} | {reason.replace('|', '/')} |" for folder, reason in reasons.items()]
    return [
        "| run that the picture lacks | reason |",
        "|---|---|",
        *lines,
        "",
        "Its numbers above are those it had when it ended. To have it drawn, restore its log; or take away its folder "
        "and its line of `rows.jsonl`, and the same command trains it anew.",
        "",
    ]


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), form) if known else ""


def _interval(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"
