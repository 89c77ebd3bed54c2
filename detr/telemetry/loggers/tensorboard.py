"""TensorBoard event files."""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorboardLogger:
    """Writes event files; look at them with `tensorboard --logdir FOLDER`. NaN and infinity are left out.

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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._output_dir))
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
