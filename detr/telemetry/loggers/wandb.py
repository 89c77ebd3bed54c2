"""Weights & Biases, online or offline."""

import importlib.util
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from detr.telemetry.loggers.attempts import Attempts
from detr.telemetry.loggers.base import Cell

_START_TIMEOUT_S = 30


class WandbLogger:
    """Sends numbers, pictures and tables to Weights & Biases; a failure is reported once and never stops the run.

    A resumed run continues the same wandb run, whose id is kept in the output folder. Steps are the axis
    `step`, so values of repeated steps are kept rather than refused.

    Args:
        project: wandb project.
        name: Name of the run.
        output_dir: The run's folder; wandb writes under `wandb/` in it.
        mode: "online", "offline" (no network; upload later with `wandb sync`) or "disabled". None leaves it
            to wandb: online, unless its own settings say otherwise.
        entity: User or team; None for wandb's default.
        tags: Tags of the run.
        config_path: JSON or YAML file with the resolved config, shown as the run's config where it exists
            when the first value is logged.

    Raises:
        ImportError: wandb is not installed.
        ValueError: There is no such mode.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        output_dir: Path | str,
        mode: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] = (),
        config_path: Path | str | None = None,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ImportError("logger=wandb needs wandb, which is not installed; run `pip install wandb`")
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"logger.wandb.mode={mode} is unknown; use online, offline, disabled or null")
        self._project = project
        self._name = name
        self._output_dir = Path(output_dir)
        self._mode = cast(Literal["online", "offline", "disabled"] | None, mode)
        self._entity = entity
        self._tags = list(tags)
        self._config_path = None if config_path is None else Path(config_path)
        self._run: Any = None
        self._attempt = Attempts("wandb")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._attempt(lambda: self._log(step, values))

    def log_images(self, step: int, name: str, images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._attempt(lambda: self._log(step, _pictures(name, images)))

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._attempt(lambda: self._log(step, {name: _table(columns, rows)}))

    def close(self) -> None:
        if self._run is not None:
            self._attempt(self._run.finish)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is None:
            self._run = self._start()
        self._run.log({**values, "step": step})

    def _start(self) -> Any:
        import wandb

        id_path = self._output_dir / "wandb" / "run_id.txt"
        id_path.parent.mkdir(parents=True, exist_ok=True)
        run_id = id_path.read_text(encoding="utf-8").strip() if id_path.exists() else uuid.uuid4().hex[:8]
        # an unanswered question for the key, or an unreachable server, must not hold up the run for long
        wandb.setup(wandb.Settings(login_timeout=_START_TIMEOUT_S))
        run = wandb.init(
            project=self._project,
            name=self._name,
            entity=self._entity,
            tags=self._tags,
            dir=str(self._output_dir),
            mode=self._mode,
            id=run_id,
            resume="allow",
            config=self._read_config(),
            # capturing stdout would fight with the progress bar
            settings=wandb.Settings(console="off", init_timeout=_START_TIMEOUT_S),
        )
        id_path.write_text(run_id + "\n", encoding="utf-8")
        run.define_metric("*", step_metric="step")
        return run

    def _read_config(self) -> dict[str, Any] | None:
        if self._config_path is None or not self._config_path.exists():
            return None
        text = self._config_path.read_text(encoding="utf-8")
        if self._config_path.suffix == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)


def _pictures(name: str, images: Mapping[str, NDArray[np.uint8]]) -> dict[str, Any]:
    import wandb

    # each under a name of its own: wandb shows pictures of one name in one size. A photo is several times smaller as
    # JPEG, and a run keeps those of every evaluation
    return {f"{name}/{caption}": wandb.Image(image, file_type="jpg") for caption, image in images.items()}


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Any:
    import wandb

    return wandb.Table(columns=list(columns), data=[[_finite(cell) for cell in row] for row in rows])


def _finite(cell: Cell) -> Cell:
    """A cell without NaN and infinity, which tables of wandb sort and average as numbers."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
