"""What the reports of all findings have in common."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a report's numbers come from.

    Attributes:
        title: Its heading.
        command: What made it.
        environment: Versions, GPU and commit, a line each.
        date: ISO 8601.
        picture: Name of its plot, in the same folder.
    """

    title: str
    command: str
    environment: str
    date: str
    picture: str

    def lines(self) -> list[str]:
        """The head of a Markdown report."""
        facts = f"```\n$ {self.command}\n{self.environment}\n{'date':<8}  {self.date}\n```"
        return [f"# {self.title}", "", facts, "", f"![{self.title}]({self.picture})"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; short rows are filled up."""
    lines = [_line(header), _line(["---"] * len(header))]
    return lines + [_line([*row, *[""] * (len(header) - len(row))]) for row in rows]


def number(value: float | int | None, form: str = ".4f") -> str:
    """A number as a cell, empty if there is none."""
    return "" if value is None else f"{value:{form}}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
