"""A tuning run as tables."""

from collections.abc import Sequence

from detr.benchmark.ops.tune import Candidate, ClassResult, Trial
from ops.msda.tuning.launch_shape import Choice


def result_table(result: ClassResult, *, max_rows: int | None = None) -> str:
    """The candidates of a class, the fastest first, with their ratio to what is shipped.

    Args:
        max_rows: Of candidates that were only screened or are out; None for all. Finalists are always shown.
    """
    finalists = [trial for trial in result.trials if trial.rounds_ms]
    others = [trial for trial in result.trials if not trial.rounds_ms]
    shown = others if max_rows is None else sorted(others, key=_order)[:max_rows]
    lines = ["| launch shape | ms | x shipped | |", "| --- | --- | --- | --- |"]
    lines += [_row(trial, result) for trial in (*sorted(finalists, key=_order), *sorted(shown, key=_order))]
    num_out = sum(trial.status != "ok" for trial in others)
    if len(shown) < len(others):
        lines += ["", f"{len(others) - len(shown)} more were slower in the screening or out ({num_out} out in all)."]
    return "\n".join(lines)


def result_line(result: ClassResult) -> str:
    """What a class ends with, in one line."""
    if result.choice == result.shipped:
        return f"{result.kind}: nothing is faster than the shipped launch shapes by more than the noise"
    ratio = "" if result.shipped_ms is None else f", {result.ms / result.shipped_ms:.3f} x shipped"
    return f"{result.kind}: {_named(result.choice)}, {result.ms:.4f} ms{ratio}"


def markdown_report(results: Sequence[ClassResult], *, command: str, environment: str, date: str, note: str) -> str:
    """All candidates of all classes."""
    lines = ["# Launch shapes", "", f"```\n$ {command}\n{environment}\n{'date':<8}  {date}\n```", "", note, ""]
    lines += [f"- {result_line(result)}" for result in results]
    for result in results:
        lines += ["", f"## {result.kind}", "", result_table(result)]
    lines += [
        "",
        "Medians of CUDA events around one pass, fused form. Candidates met their error bound against float64 before "
        "they were timed. Finalists took turns in rounds (spread of the rounds' medians in brackets); the rest were "
        "timed once and briefly.",
        "",
    ]
    return "\n".join(lines)


def _named(choice: Choice) -> Candidate:
    return Candidate(choice.backend, choice.launch_shapes(choice.backend))


def _order(trial: Trial) -> tuple[bool, float]:
    return trial.status != "ok", trial.ms or 0.0


def _row(trial: Trial, result: ClassResult) -> str:
    if trial.ms is None:
        return f"| {trial.candidate} | | | {trial.status} |"
    ratio = "" if not result.shipped_ms else f"{trial.ms / result.shipped_ms:.3f}"
    spread = f" [+- {trial.noise:.1%}]" if trial.rounds_ms else ""
    marks = []
    if trial.candidate == _named(result.shipped):
        marks.append("shipped")
    if trial.candidate == _named(result.choice):
        marks.append("winner")
    if not trial.rounds_ms:
        marks.append("screened")
    return f"| {trial.candidate} | {trial.ms:.4f}{spread} | {ratio} | {', '.join(marks)} |"
