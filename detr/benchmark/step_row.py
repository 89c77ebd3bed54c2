"""One row of a step benchmark: what was run, where, and what came out."""

import csv
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class StepRow:
    """A row; the order of the fields is the order of the columns.

    Attributes:
        name: Of the row in its preset.
        repeat: 0 and up; each repeat is a fresh process.
        status: `ok`, or why there are no numbers.
        verified: Whether the kernel met its error bound in this process before it was timed; None where there is
            no bound to meet (the reference itself).
        kernel: Backend.
        accumulator: float32 | native.
        deterministic: Whether reruns are bitwise equal.
        precision: Of the step.
        compile: Whether regions were compiled.
        batch_size: Images.
        height: Padded, in pixels.
        width: Padded, in pixels.
        images_per_s: Batch over the median step.
        step_ms: Median.
        step_ms_p20: 20th percentile.
        step_ms_p80: 80th percentile.
        phases_ms: Median of each phase.
        msda_share: Of the device's kernel time, in [0, 1].
        peak_gib: Allocator's peak; None on the CPU.
        loss: After the timed steps.
        date: Of the measurement, ISO 8601.
        overrides: What made the row, to run it again.
        environment: Versions, GPU and commit, captured in the row's process.
    """

    name: str
    repeat: int
    status: str
    verified: bool | None = None
    kernel: str | None = None
    accumulator: str | None = None
    deterministic: bool | None = None
    precision: str | None = None
    compile: bool | None = None
    batch_size: int | None = None
    height: int | None = None
    width: int | None = None
    images_per_s: float | None = None
    step_ms: float | None = None
    step_ms_p20: float | None = None
    step_ms_p80: float | None = None
    phases_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    msda_share: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    date: str | None = None
    overrides: tuple[str, ...] = ()
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**fields | {"overrides": tuple(fields["overrides"])})


def write_csv(rows: Sequence[StepRow], path: Path) -> None:
    """All columns but the nested ones; phases become columns of their own."""
    phases = sorted({phase for row in rows for phase in row.phases_ms})
    nested = {"phases_ms", "environment", "overrides"}
    names = [field.name for field in dataclasses.fields(StepRow) if field.name not in nested]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *(f"{phase}_ms" for phase in phases), "overrides"])
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([*values, *(row.phases_ms.get(phase) for phase in phases), " ".join(row.overrides)])
