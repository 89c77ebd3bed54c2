"""One row of an operator benchmark."""

import csv
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class OpRow:
    """A row; the order of the fields is the order of the columns.

    Attributes:
        case: encoder | uniform | decoder.
        batch_size: Images.
        noise_px: Spread of the encoder's offsets, in pixels.
        dtype: Of value, weights and gradient.
        backend: cuda, triton, grid_sample (the reference, eager) or a peer's name.
        accumulator: float32 | native.
        deterministic: Whether reruns are bitwise equal.
        status: `ok`, or why there are no numbers.
        verified: Whether the error bound was met before timing; None for baselines, which have no bound to meet.
        forward_ms: Median under no_grad, with 20th and 80th percentiles.
        forward_grad_ms: Median with gradients recorded.
        backward_ms: Median of all three gradients, with percentiles.
        host_forward_us: Until a forward call returns to Python.
        peak_mib: Allocator's peak over forward and backward above the inputs.
        forward_gbps: Compulsory bytes over forward_ms, in GB/s.
        backward_gbps: Likewise for the backward pass.
        error_output: Relative norm against float64 on the first image.
        error_grad_value: Likewise.
        error_grad_locations: Likewise.
        error_grad_weights: Likewise.
    """

    case: str
    batch_size: int
    noise_px: float
    dtype: str
    backend: str
    accumulator: str
    deterministic: bool
    status: str
    verified: bool | None = None
    forward_ms: float | None = None
    forward_p20_ms: float | None = None
    forward_p80_ms: float | None = None
    forward_grad_ms: float | None = None
    backward_ms: float | None = None
    backward_p20_ms: float | None = None
    backward_p80_ms: float | None = None
    host_forward_us: float | None = None
    peak_mib: float | None = None
    forward_gbps: float | None = None
    backward_gbps: float | None = None
    error_output: float | None = None
    error_grad_value: float | None = None
    error_grad_locations: float | None = None
    error_grad_weights: float | None = None

    @property
    def workload(self) -> tuple[str, int, float, str]:
        """What rows must share to be compared."""
        return self.case, self.batch_size, self.noise_px, self.dtype

    @property
    def name(self) -> str:
        return f"{self.backend} {self.accumulator}" + (" deterministic" if self.deterministic else "")


def write_rows(rows: Sequence[Any], csv_path: Path, json_path: Path) -> None:
    """Rows of one dataclass as CSV and as one JSON object a line."""
    with csv_path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    json_path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows), encoding="utf-8")
