"""Names of output folders that follow from what a tool is given, where none was chosen."""

import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

_WILDCARDS = "*?["
# files that have the same name in every folder of a run or a result
_IN_EVERY_FOLDER = re.compile(r"best|last|step_\d+|imported|detections|ground_truth|predictions")


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
    _name_after(cfg, [cfg.source])


def name_after_checkpoint_and_source(cfg: DictConfig) -> None:
    """Name a result after the weights and the images it is of.

    Args:
        cfg: With `checkpoint` and `source`; `name` gets the names of both.
    """
    _name_after(cfg, [cfg.checkpoint, cfg.source])


def name_after_evaluated(cfg: DictConfig) -> None:
    """Name an evaluation after what it scores, and after the dataset where that stands on the command line.

    Args:
        cfg: Of tools/evaluate.py; `name` gets the name of the checkpoint or the detections, and of `data.root` or
            `data=`, and of `data.val.annotations`.
    """
    keys = chosen_keys()
    paths = [cfg.checkpoint or cfg.detections]
    if "data.root" in keys:
        paths.append(OmegaConf.select(cfg, "data.root"))
    elif "data" in keys:
        paths.append(HydraConfig.get().runtime.choices["data"])
    if "data.val.annotations" in keys:
        paths.append(OmegaConf.select(cfg, "data.val.annotations"))
    _name_after(cfg, paths)


def name_after_analyzed(cfg: DictConfig) -> None:
    """Name a report after what it explains.

    Args:
        cfg: Of tools/analyze.py; `name` gets the name of `evaluation`, or of `detections` and `annotations`.
    """
    _name_after(cfg, [cfg.evaluation, cfg.detections, cfg.annotations])


def _name_after(cfg: DictConfig, paths: list[str | None]) -> None:
    """Append the names of what is given; nothing if a name or a folder was chosen."""
    if not chosen_keys() & {"name", "output_dir"}:
        cfg.name = "_".join([cfg.name, *filter(None, (_name_of(str(path)) for path in paths if path is not None))])


def _name_of(path: str) -> str:
    """Of a folder, a file, or the folder of a pattern; "" for the root of the file system."""
    fixed = Path(path).expanduser()
    while any(sign in str(fixed) for sign in _WILDCARDS) and not fixed.exists():
        fixed = fixed.parent
    fixed = fixed.resolve()
    if fixed.is_dir():
        return fixed.name
    return f"{fixed.parent.name}_{fixed.stem}" if _IN_EVERY_FOLDER.fullmatch(fixed.stem) else fixed.stem
