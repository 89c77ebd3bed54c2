"""One training run of a comparison of accuracies: what was run, and how well it detects."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from detr.telemetry.loggers import read_metrics


@dataclass(frozen=True)
class AccuracyRow:
    """A run; the order of the fields is the order of the columns.

    Attributes:
        name: Of the configuration in its preset.
        seed: Of the run.
        status: `ok`, or why there are no numbers.
        AP: Of the last evaluation, on the validation set; COCO's, as the other metrics.
        AP50: Likewise.
        AP75: Likewise.
        best_AP: Of the best evaluation, which was chosen on the same images.
        best_epoch: When it was.
        num_epochs: Trained.
        num_steps: Optimizer steps.
        num_skipped: Of them, because gradients were not finite; None where a log does not say.
        loss: Mean over the last tenth of the logs.
        train_s: Seconds of training, evaluations left out.
        wall_s: Seconds of the process that ended the run, start and evaluations included.
        images_per_s: Median over the logs after the first, with whatever else the machine did.
        date: Of the end, ISO 8601.
        folder: Of the run.
        overrides: What made the row, to run it again.
        environment: Versions, GPU and commit, captured by the run.
    """

    name: str
    seed: int
    status: str
    AP: float | None = None
    AP50: float | None = None
    AP75: float | None = None
    best_AP: float | None = None
    best_epoch: int | None = None
    num_epochs: int | None = None
    num_steps: int | None = None
    num_skipped: int | None = None
    loss: float | None = None
    train_s: float | None = None
    wall_s: float | None = None
    images_per_s: float | None = None
    date: str | None = None
    folder: str | None = None
    overrides: tuple[str, ...] = ()
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**fields | {"overrides": tuple(fields.get("overrides", ()))})

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def commit(self) -> str | None:
        git = self.environment.get("git")
        return None if git is None else f"{git['commit'][:12]}{' + changes' if git['dirty'] else ''}"


def row_of_run(
    folder: Path, *, name: str, seed: int, overrides: tuple[str, ...], wall_s: float, date: str
) -> AccuracyRow:
    """The row of a finished run, read from its folder.

    Raises:
        ValueError: The folder has no evaluation, or a damaged log.
        FileNotFoundError: It has no log.
    """
    logs = read_metrics(folder / "metrics.jsonl")
    evaluations = [row for row in logs if row.get("val/AP") is not None]
    if not evaluations:
        raise ValueError(f"{folder / 'metrics.jsonl'} holds no evaluation; did the run finish?")
    last = evaluations[-1]
    best = max(evaluations, key=lambda row: float(row["val/AP"]))
    steps = [row for row in logs if row.get("train/loss") is not None]
    speeds = [row["train/images_per_s"] for row in steps[1:] or steps]
    tail = [row["train/loss"] for row in steps[-max(1, len(steps) // 10) :]]
    return AccuracyRow(
        name=name,
        seed=seed,
        status="ok",
        AP=last["val/AP"],
        AP50=last.get("val/AP50"),
        AP75=last.get("val/AP75"),
        best_AP=best["val/AP"],
        best_epoch=best["epoch"],
        num_epochs=last["epoch"],
        num_steps=last["step"],
        num_skipped=_num_skipped(steps),
        loss=statistics.fmean(tail) if tail else None,
        train_s=60 * last["train/minutes"],
        wall_s=wall_s,
        images_per_s=statistics.median(speeds) if speeds else None,
        date=date,
        folder=str(folder),
        overrides=overrides,
        environment=json.loads((folder / "environment.json").read_text(encoding="utf-8")),
    )


def read_accuracy_rows(path: Path) -> list[AccuracyRow]:
    """The rows of a file of `AccuracyRow.to_json` lines; none if there is no file.

    A line that a kill cut off at the end is left out: its run is done, and gets its row when it is looked at again.

    Raises:
        ValueError: Another line is not a row.
    """
    if not path.is_file():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(AccuracyRow.from_json(line))
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}, is not a row of tools/compare_accuracy.py ({error}); remove that line, and "
                "the same command makes it anew from its run"
            ) from error
    return rows


def _num_skipped(steps: list[dict[str, Any]]) -> int | None:
    """Steps that were skipped, from the share that each log has of the steps since the one before."""
    total, before = 0.0, 0
    for row in steps:
        if row.get("train/skipped") is None:
            return None
        total += row["train/skipped"] * (row["step"] - before)
        before = row["step"]
    return round(total)
