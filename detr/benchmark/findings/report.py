"""What the reports of all findings have in common."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; short rows are filled up."""
    lines = [_line(header), _line(["---"] * len(header))]
    return lines + [_line([*row, *[""] * (len(header) - len(row))]) for row in rows]


def number(value: float | int | None, form: str = ".4f") -> str:
    """A number as a cell, empty if there is none."""
    return "" if value is None else f"{value:{form}}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
