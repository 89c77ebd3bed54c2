"""Names of output folders that follow from what a tool is given, where none was chosen."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

_WILDCARDS = "*?["


def chosen_keys() -> set[str]:
    """The keys that stand on the command line."""
    return {override.split("=")[0].lstrip("+") for override in HydraConfig.get().overrides.task}


def name_after_data(cfg: DictConfig) -> None:
    """Name a training run after its own dataset; an experiment brings its name along.

    Args:
        cfg: Of tools/train.py; `name` is set, to that of the folder `data.root` or of the annotation file.
    """
    if chosen_keys() & {"name", "output_dir", "experiment"} or "root" not in cfg.data:
        return
    name = ""
    if cfg.data.root is not None:
        name = Path(cfg.data.root).expanduser().resolve().name
    elif cfg.data.train.annotations is not None:
        name = Path(cfg.data.train.annotations).stem
    cfg.name = name or cfg.name


def name_after_source(cfg: DictConfig) -> None:
    """Name a result after the images it is of, so that each source has a folder of its own.

    Args:
        cfg: With `source`; `name` gets the name of the image, folder or video, of a pattern that of its folder.
    """
    if chosen_keys() & {"name", "output_dir"} or cfg.source is None:
        return
    fixed = Path(str(cfg.source)).expanduser()
    while any(sign in str(fixed) for sign in _WILDCARDS) and not fixed.exists():
        fixed = fixed.parent
    fixed = fixed.resolve()
    name = fixed.name if fixed.is_dir() else fixed.stem
    cfg.name = f"{cfg.name}_{name}" if name else cfg.name
