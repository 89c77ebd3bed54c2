"""What is wrong with a dataset, entry by entry, and what is done about it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["note", "fault", "fatal"]
"""How bad a finding is.

note: training is not affected. fault: something is dropped, guessed, repaired, missing or over a limit.
fatal: the file cannot be used at all.
"""

FaultyAnnotations = Literal["error", "drop"]
FaultyImages = Literal["error", "skip"]

NUM_LISTED = 10


@dataclass(frozen=True)
class Fault:
    """One finding.

    Attributes:
        kind: A short name of this kind of finding, such as "box_not_finite".
        severity: See `Severity`.
        file: The annotation file or image.
        problem: What was asked and what was found, with the entry it is about.
        action: What training and evaluation do about it.
        image_id: The image it is about, as in the file.
        annotation_id: The annotation it is about, as in the file.
    """

    kind: str
    severity: Severity
    file: str
    problem: str
    action: str
    image_id: Any = None
    annotation_id: Any = None

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain values for JSON."""
        values = asdict(self)
        for key in ("image_id", "annotation_id"):
            if not isinstance(values[key], int | str | None):
                values[key] = repr(values[key])
        return values


def exit_code(faults: Iterable[Fault]) -> int:
    """0: nothing, or notes only; 1: a fault; 2: a file that cannot be used."""
    return max(({"note": 0, "fault": 1, "fatal": 2}[fault.severity] for fault in faults), default=0)


def format_faults(faults: Sequence[Fault], *, num_listed: int = NUM_LISTED) -> str:
    """One block a kind, worst first: how many there are, the first of them, what is done about them."""
    counts = Counter((fault.severity, fault.kind) for fault in faults)
    order = sorted(counts, key=lambda key: ("fatal", "fault", "note").index(key[0]))
    blocks = []
    for severity, kind in order:
        members = [fault for fault in faults if (fault.severity, fault.kind) == (severity, kind)]
        lines = [f"{severity}: {kind} ({len(members)})"]
        lines += [f"  {fault.file}: {fault.problem} -> {fault.action}" for fault in members[:num_listed]]
        if len(members) > num_listed:
            lines.append(f"  ... and {len(members) - num_listed} more")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def listed(lines: Sequence[str], *, num_listed: int = NUM_LISTED) -> str:
    """The first lines, indented, and how many there are beyond."""
    more = len(lines) - num_listed
    return "\n  ".join(lines[:num_listed]) + (f"\n  ... and {more} more" if more > 0 else "")
