"""The folder of a run: claimed by one configuration, resumed or refused, never overwritten."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from detr.engine.checkpoint import load_checkpoint
from detr.engine.checkpoint_files import newest_readable, write_atomically
from detr.telemetry.environment import collect_environment

LAST = "last.pt"
BEST = "best.pt"
METRICS = "metrics.json"
METRICS_LOG = "metrics.jsonl"
CONFIG = "config.yaml"
PREDICTIONS = "predictions.json"
DETECTIONS = "detections.json"
GROUND_TRUTH = "ground_truth.json"
SAMPLING = "sampling.json"

# a folder with one of these holds results that must not be lost
_RESULTS = (LAST, BEST, METRICS, PREDICTIONS, SAMPLING)

# keys that change where a run computes and what it says, not what it computes
HARMLESS_KEYS = (
    "name",
    "output_dir",
    "resume",
    "init_from",
    "reset_head",
    "device",
    "logger",
    "data.num_workers",
    "trainer.log_every",
    "trainer.save_every",
    "trainer.save_every_steps",
    "trainer.keep_last",
    "trainer.hang_s",
    "trainer.eval_every_minutes",
    "trainer.max_minutes",
    "trainer.profile_steps",
    "trainer.num_pictures",
    # a warning advises to change it, and a run lowers it itself
    "trainer.max_graphs",
    "report",
)


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes.

    Attributes:
        path: The folder; made by `write_config`.
        resume_from: The checkpoint to go on from, or None for a new run.
    """

    path: Path
    resume_from: Path | None

    @property
    def is_new(self) -> bool:
        """Whether nothing of this run is in the folder yet."""
        return self.resume_from is None or self.resume_from.parent.resolve() != self.path.resolve()

    @property
    def last(self) -> Path:
        return self.path / LAST

    @property
    def best(self) -> Path:
        return self.path / BEST

    def step_checkpoint(self, step: int) -> Path:
        """The checkpoint of an optimizer step."""
        return self.path / f"step_{step:08d}.pt"

    def step_checkpoints(self) -> list[Path]:
        """The checkpoints by step that there are, newest first."""
        return _step_checkpoints(self.path)

    @property
    def metrics(self) -> Path:
        """The numbers of the last evaluation."""
        return self.path / METRICS

    @property
    def metrics_log(self) -> Path:
        """Every logged number."""
        return self.path / METRICS_LOG


def open_run_folder(output_dir: str | Path, config: Mapping[str, Any], *, resume: str) -> RunFolder:
    """Decide whether a training run starts in `output_dir`, goes on there, or must not touch it.

    Args:
        output_dir: Need not exist.
        config: The resolved configuration, plain Python.
        resume: "auto" goes on from the newest checkpoint that is not damaged if the folder holds a run of the same
            configuration; "never" wants a folder without a run; a path goes on from that checkpoint, whatever its
            configuration. The same command given again, path and all, goes on in its own folder.

    Raises:
        ValueError: The folder holds another run, whose differing keys are named, or a run when
            `resume=never`, or only damaged checkpoints.
        FileNotFoundError: `resume` is a path without a file.
    """
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir={path} is a file; give a folder")
    results = _results_in(path)
    if resume not in ("auto", "never") and not (results and _began_with(path, config, resume)):
        checkpoint: Path | None = Path(resume)
        if not Path(resume).is_file():
            raise FileNotFoundError(
                f"resume={resume}: no such checkpoint; give a last.pt, or resume=auto or resume=never"
            )
        if results and Path(resume).resolve() != (path / LAST).resolve():
            raise ValueError(
                f"resume={resume} would go on in {path}, which holds a run of its own ({', '.join(results)}); "
                f"resume from {path / LAST}, or give another name="
            )
    elif not results:
        checkpoint = None
    else:
        if resume == "never":
            raise ValueError(
                f"{path} already holds a run ({', '.join(results)}) and resume=never; give another name=, or "
                "resume=auto to go on with it"
            )
        _require_same_run(path, config, f", or resume={path / LAST} to go on from it with these")
        checkpoint = newest_readable(_checkpoints_in(path), load_checkpoint)
    return RunFolder(path, checkpoint)


def open_result_folder(output_dir: str | Path, config: Mapping[str, Any]) -> Path:
    """The folder of an evaluation or a prediction: new, or of the same configuration, which may be repeated.

    Raises:
        ValueError: The folder holds something else.
    """
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir={path} is a file; give a folder")
    if _results_in(path):
        _require_same_run(path, config, f" (such as name={path.name}_2), or remove that folder")
    return path


def start_run_folder(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Write what the run is and what it runs on, before its first step.

    The log of an earlier start that left no checkpoint is set aside: it may be of another configuration.
    """
    if folder.resume_from is None and folder.metrics_log.exists():
        folder.metrics_log.replace(folder.path / f"interrupted_{METRICS_LOG}")
    write_config(folder.path, config)
    write_json(folder.path / "environment.json", collect_environment())


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Make the folder and write the resolved configuration to its config.yaml, by which it knows its run again.

    Raises:
        OSError: It could not be written; the old one is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def write_json(path: Path, value: Any) -> None:
    """Write plain JSON; a reader never sees half a file.

    Raises:
        OSError: It could not be written; the old one is as it was.
    """
    _write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys that differ, as "key: old -> new", without the harmless ones.

    A key that one of them lacks is as if it were null there: so a run goes on with a version that has more options.
    """
    old_values, new_values = flatten(old), flatten(new)
    absent = "(absent)"
    return [
        f"{key}: {old_values.get(key, absent)} -> {new_values.get(key, absent)}"
        for key in sorted(old_values.keys() | new_values.keys())
        if old_values.get(key) != new_values.get(key) and not _is_harmless(key)
    ]


def _require_same_run(path: Path, config: Mapping[str, Any], advice: str) -> None:
    results = ", ".join(_results_in(path))
    stored = _stored_config(path)
    if stored is None:
        raise ValueError(
            f"{path} holds results ({results}) but no {CONFIG}, so it cannot be told whose they are; give another name="
        )
    differences = config_differences(stored, config)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:15])
        more = f"\n  and {len(differences) - 15} more" if len(differences) > 15 else ""
        raise ValueError(
            f"{path} already holds a different run ({results}). It differs in:\n{shown}{more}\n"
            f"Give the settings of that run, or another name={advice}"
        )


def _stored_config(path: Path) -> dict[str, Any] | None:
    if not (path / CONFIG).is_file():
        return None
    stored = OmegaConf.to_container(OmegaConf.load(path / CONFIG))
    assert isinstance(stored, dict)
    return {str(key): value for key, value in stored.items()}


def _began_with(path: Path, config: Mapping[str, Any], resume: str) -> bool:
    """Whether the run in `path` is this very command, which began with the checkpoint `resume` of another folder."""
    stored = _stored_config(path)
    return stored is not None and stored.get("resume") == resume and not config_differences(stored, config)


def _checkpoints_in(path: Path) -> list[Path]:
    """What a run can go on from, newest first."""
    return [file for file in (path / LAST, *_step_checkpoints(path), path / BEST) if file.is_file()]


def _results_in(path: Path) -> list[str]:
    found = [name for name in _RESULTS if (path / name).exists()]
    return found + sorted(file.name for file in _step_checkpoints(path))


def _step_checkpoints(path: Path) -> list[Path]:
    return sorted(path.glob("step_*.pt"), reverse=True)


def _is_harmless(key: str) -> bool:
    return any(key == harmless or key.startswith(harmless + ".") for harmless in HARMLESS_KEYS)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by dotted key; empty mappings count as values."""
    if isinstance(config, Mapping) and config:
        flat: dict[str, Any] = {}
        for key, value in config.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: list(config) if isinstance(config, list | tuple) else config}
