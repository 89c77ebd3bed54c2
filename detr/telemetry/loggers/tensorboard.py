"""TensorBoard event files."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detr.telemetry.loggers.attempts import Attempts
from detr.telemetry.loggers.base import Cell


class TensorboardLogger:
    """Writes event files; look at them with `tensorboard --logdir FOLDER`. NaN and infinity are left out.

    A failure is reported once and never stops the run.

    Pictures are under IMAGES, a slider over the steps each; tables are under TEXT.

    Args:
        output_dir: Folder of the event files, made at the first `log`.

    Raises:
        ImportError: The optional package tensorboard is not installed.
    """

    def __init__(self, output_dir: Path | str) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "logger=tensorboard needs the optional package tensorboard, which is not installed; run "
                "`pip install 'deformable-detr[tensorboard]'` (or `pip install tensorboard`)"
            )
        self._output_dir = Path(output_dir)
        self._writer: Any = None
        self._attempt = Attempts("TensorBoard")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._attempt(lambda: self._log(step, values))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._open()
        for name, value in values.items():
            if math.isfinite(value):
                writer.add_scalar(name, value, step)

    def log_images(self, step: int, name: str, images: Mapping[str, NDArray[np.uint8]]) -> None:
        self._attempt(lambda: self._log_images(step, name, images))

    def _log_images(self, step: int, name: str, images: Mapping[str, NDArray[np.uint8]]) -> None:
        writer = self._open()
        for caption, image in images.items():
            writer.add_image(f"{name}/{caption}", image, step, dataformats="HWC")

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        self._attempt(lambda: self._open().add_text(name, text, step))

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._output_dir))
        return self._writer


def _text(cell: Cell) -> str:
    """A cell in Markdown."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    # a bar would end the cell
    return str(cell).replace("|", "\\|")
