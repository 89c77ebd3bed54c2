"""A tensor that did not fit, and the table that says so."""

from collections.abc import Sequence
from dataclasses import dataclass

_NUM_SHOWN = 15


@dataclass(frozen=True)
class Mismatch:
    """A tensor without its counterpart.

    Attributes:
        ours: Our name; None for a tensor that is left over in the file.
        theirs: Its name in the file; None where it has none.
        problem: What is wrong.
    """

    ours: str | None
    theirs: str | None
    problem: str


def format_mismatches(mismatches: Sequence[Mismatch], source: str, *, num_tensors: int, cause: str) -> str:
    """The first mismatch, the likely cause, and a table of the first mismatches."""
    first = mismatches[0]
    rows = [(row.ours or "-", row.theirs or "-", row.problem) for row in mismatches[:_NUM_SHOWN]]
    header = ("this model", "file", "problem")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(2)]
    lines = [f"  {ours:<{widths[0]}}  {theirs:<{widths[1]}}  {problem}" for ours, theirs, problem in [header, *rows]]
    if len(mismatches) > _NUM_SHOWN:
        lines.append(f"  and {len(mismatches) - _NUM_SHOWN} more")
    return "\n".join(
        [
            f"{source} does not fit this model: {len(mismatches)} mismatches, {num_tensors} tensors in the model.",
            f"First: {first.ours or first.theirs}: {first.problem}",
            f"Likely cause: {cause}",
            *lines,
        ]
    )
