"""Where this package keeps files between processes."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of compiled kernels and tuned launch shapes: `$XDG_CACHE_HOME/deformable-detr`, by default under
    `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "deformable-detr"
