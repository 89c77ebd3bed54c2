"""One row of a step benchmark: what was run, where, and what came out."""

import csv
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from detr.benchmark.steps.whole_steps import WholeSteps


@dataclass(frozen=True)
class StepRow:
    """A row; the order of the fields is the order of the columns.

    Attributes:
        name: Of the row in its preset.
        repeat: 0 and up; each repeat is a fresh process.
        status: `ok`, `recorded` for a figure measured elsewhere, or why there are no numbers.
        verified: Whether the kernel met its error bound in this process before it was timed; None where there is
            no bound to meet (the reference itself).
        model: Choice of configs/model, or whose model it is.
        kernel: Backend.
        accumulator: float32 | native.
        deterministic: Whether reruns are bitwise equal.
        precision: Of the step.
        compile: Whether regions were compiled.
        cuda_graphs: Whether forward and backward ran as captured graphs.
        num_gpus: Processes that trained together.
        batch_size: Images a GPU.
        data_source: synthetic | cached | loader; see `detr.benchmark.steps.data`.
        num_workers: Of the loader, a GPU; None for other sources.
        height: Padded, in pixels; None where batches differ.
        width: Likewise.
        padded_mpx: Mean size of an image in the timed steps, with its padding, in millions of pixels.
        images_per_s: All GPUs together, over the median step, or over the mean step where batches come from a loader,
            since they come in bursts.
        step_ms: Median, waiting for data included.
        step_ms_p20: 20th percentile.
        step_ms_p80: 80th percentile.
        step_ms_mean: Mean.
        phases_ms: Median of each phase.
        kernel_ms: Sum of the device's kernels, a step; on the CPU of the operators.
        num_kernels: Their number, a step.
        msda_forward_ms: Multi-scale deformable attention in it, forward kernels, a step.
        msda_backward_ms: Likewise backward.
        msda_share: Both over `kernel_ms`, in [0, 1].
        host_syncs: Waits of the host for the device in one step; None on the CPU.
        host_sync_places: File and line of each, and how often.
        num_graphs: Graphs that torch.compile made in the process.
        num_recompiles: Of them during the timed steps; their times are then not those of a settled step.
        peak_gib: Most memory in tensors; with captured graphs what the allocator held, since the tensors within
            are not counted; None on the CPU.
        reserved_gib: Most memory the allocator held; likewise.
        loss: Of the last timed step.
        losses: Of every step, in a comparison of numerics.
        top_kernels_ms: The longest kernels, milliseconds a step.
        spent_s: What the row's wall time went into: start (Python, imports, configuration), build (gate, model,
            data), warmup (compilation), steps, profile.
        date: Of the measurement, ISO 8601.
        overrides: What made the row, to run it again.
        environment: Versions, GPU and commit, captured in the row's process.
    """

    name: str
    repeat: int
    status: str
    verified: bool | None = None
    model: str | None = None
    kernel: str | None = None
    accumulator: str | None = None
    deterministic: bool | None = None
    precision: str | None = None
    compile: bool | None = None
    cuda_graphs: bool | None = None
    num_gpus: int = 1
    batch_size: int | None = None
    data_source: str | None = None
    num_workers: int | None = None
    height: int | None = None
    width: int | None = None
    padded_mpx: float | None = None
    images_per_s: float | None = None
    step_ms: float | None = None
    step_ms_p20: float | None = None
    step_ms_p80: float | None = None
    step_ms_mean: float | None = None
    phases_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    kernel_ms: float | None = None
    num_kernels: float | None = None
    msda_forward_ms: float | None = None
    msda_backward_ms: float | None = None
    msda_share: float | None = None
    host_syncs: int | None = None
    host_sync_places: dict[str, int] = dataclasses.field(default_factory=dict)
    num_graphs: int | None = None
    num_recompiles: int | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    top_kernels_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    spent_s: dict[str, float] = dataclasses.field(default_factory=dict)
    date: str | None = None
    overrides: tuple[str, ...] = ()
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_times(self, whole: WholeSteps, *, world_size: int) -> Self:
        """This row with what was timed of its steps; reads its batch size and data source.

        Args:
            whole: Of one rank.
            world_size: Ranks, which all step together.
        """
        assert self.batch_size is not None
        # a loader's batches come in bursts, so the median step would leave out the waits between them
        step_ms = whole.mean_ms if self.data_source == "loader" else whole.median_ms
        return dataclasses.replace(
            self,
            images_per_s=self.batch_size * world_size / step_ms * 1e3,
            step_ms=whole.median_ms,
            step_ms_p20=whole.p20_ms,
            step_ms_p80=whole.p80_ms,
            step_ms_mean=whole.mean_ms,
            padded_mpx=whole.padded_mpx,
            num_recompiles=whole.num_recompiles,
            peak_gib=whole.reserved_gib if self.cuda_graphs else whole.peak_gib,
            reserved_gib=whole.reserved_gib,
            spent_s=self.spent_s | {"warmup": whole.warmup_s},
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def mode(self) -> str:
        """Precision, and how the step is launched, as tables show it."""
        words = (self.precision or "", "compiled" if self.compile else "", "graphs" if self.cuda_graphs else "")
        return " ".join(word for word in words if word)

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**fields | {name: tuple(fields.get(name, ())) for name in ("losses", "overrides")})


def read_rows(path: Path) -> list[StepRow]:
    """The rows of a rows.jsonl file.

    Raises:
        ValueError: A line is not a row.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(StepRow.from_json(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is not a row of tools/benchmark.py: {error}") from error
    return rows


def flat_table(rows: Sequence[StepRow]) -> tuple[list[str], list[list[Any]]]:
    """The columns and their cells, without the nested ones; phases and parts of the wall time are columns of their own.

    Args:
        rows: One or more.

    Returns:
        The names of the columns, and a list of plain values a row; None where a row has none.
    """
    phases = sorted({phase for row in rows for phase in row.phases_ms})
    parts = sorted({part for row in rows for part in row.spent_s})
    nested = {"phases_ms", "spent_s", "host_sync_places", "top_kernels_ms", "losses", "environment", "overrides"}
    names = [field.name for field in dataclasses.fields(StepRow) if field.name not in nested]
    columns = [*names, *(f"{phase}_ms" for phase in phases), *(f"{part}_s" for part in parts), "overrides"]
    cells = []
    for row in rows:
        values = [getattr(row, name) for name in names]
        values += [row.phases_ms.get(phase) for phase in phases]
        cells.append([*values, *(row.spent_s.get(part) for part in parts), " ".join(row.overrides)])
    return columns, cells


def write_csv(rows: Sequence[StepRow], path: Path) -> None:
    """Write the columns of :func:`flat_table`."""
    columns, cells = flat_table(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(cells)
