"""Where the numbers of an operator's report come from: what stands at its head."""

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
