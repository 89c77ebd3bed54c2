"""Tuned launch shapes on disk: one JSON file a GPU model, next to the compiled kernels.

A file is only used as it was written, on the GPU model and with the kernel sources it was measured with.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ops.msda.tuning.file_lock import locked_file
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.table import Device

_FORMAT = 1
# what decides how fast a launch shape is: kernels, and how plans and classes are made
_SOURCE_FOLDERS = ("cuda/csrc", "cuda", "triton", "tuning")


class TuningFileError(ValueError):
    """A file of tuned launch shapes that cannot be used. The message says why."""


@dataclass(frozen=True)
class TunedClass:
    """One measured winner.

    Attributes:
        kind: What it is for.
        choice: The winner.
        ms: Its time.
        shipped_ms: The shipped choice's time in the same run; None if that did not run.
    """

    kind: ShapeClass
    choice: Choice
    ms: float
    shipped_ms: float | None


@dataclass(frozen=True)
class TuningFile:
    """What a file holds.

    Attributes:
        classes: The winners.
        versions: Driver, packages and date of the run, for people to read.
    """

    classes: tuple[TunedClass, ...]
    versions: Mapping[str, str]


def tuning_path(device: Device, folder: Path) -> Path:
    """The file of a GPU model in a cache folder."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return folder / "tuning" / f"{name}.json"


def write_tuning(path: Path, device: Device, tuned: TuningFile) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: The folder cannot be written.
    """
    content = {
        "format": _FORMAT,
        "note": "written by tools/tune_ops.py; a changed file is not used",
        "device": _device_record(device),
        "kernels": kernel_digest(),
        "versions": dict(tuned.versions),
        "classes": [asdict(entry) for entry in tuned.classes],
    }
    content["checksum"] = _checksum(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the rename is atomic: another process sees the old file or the new one
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(temporary, path)


def read_tuning(path: Path, device: Device) -> TuningFile:
    """Read what `write_tuning` wrote.

    Raises:
        FileNotFoundError: There is none.
        TuningFileError: It cannot be read, was changed, or is of another GPU, of other kernels or of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise TuningFileError(f"it cannot be read ({error})") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise TuningFileError("it was cut short or changed by hand")
    if content.get("format") != _FORMAT:
        raise TuningFileError(f"it has format {content.get('format')}, and this version reads {_FORMAT}")
    if content["device"] != _device_record(device):
        raise TuningFileError(f"it was measured on {content['device']}, and this is {_device_record(device)}")
    if content["kernels"] != kernel_digest():
        raise TuningFileError("it was measured with other kernel sources")
    try:
        return TuningFile(tuple(map(_tuned_class, content["classes"])), content["versions"])
    except (KeyError, TypeError, ValueError) as error:
        raise TuningFileError(f"an entry makes no sense ({error})") from error


def update_tuning(
    path: Path, device: Device, kind: ShapeClass, tuned: TunedClass | None, versions: Mapping[str, str]
) -> None:
    """Replace one class of a file, or take it out with None; a file that cannot be used is begun anew.

    Processes take turns, so that each adds to what the others wrote; `versions` are those of the last.

    Raises:
        OSError: The folder cannot be written.
    """
    if tuned is None and not path.exists():
        return
    with locked_file(path):
        try:
            classes = read_tuning(path, device).classes
        except (FileNotFoundError, TuningFileError):
            classes = ()
            if tuned is None:
                return
        kept = tuple(entry for entry in classes if entry.kind != kind)
        write_tuning(path, device, TuningFile(kept if tuned is None else (*kept, tuned), versions))


@cache
def kernel_digest() -> str:
    """A hash of the sources that measured times depend on."""
    digest = hashlib.sha256()
    for folder in _SOURCE_FOLDERS:
        files = [
            file for file in (resources.files("ops.msda") / folder).iterdir() if file.name.endswith((".cuh", ".py"))
        ]
        for file in sorted(files, key=lambda file: file.name):
            digest.update(f"{folder}/{file.name}\0{file.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:32]


def _device_record(device: Device) -> dict[str, Any]:
    major, minor = device.capability
    # a slice of a GPU has its name, and fewer multiprocessors
    return {"name": device.name, "capability": f"{major}.{minor}", "multiprocessors": device.multiprocessors}


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _tuned_class(entry: Any) -> TunedClass:
    kind, choice = ShapeClass(**entry["kind"]), entry["choice"]
    shapes = tuple(LaunchShape(**shape) for shape in choice["cuda"])
    made = Choice(choice["backend"], shapes, LaunchShape(**choice["triton"]))
    check_choice(kind, made)
    shipped_ms = entry["shipped_ms"]
    return TunedClass(kind, made, float(entry["ms"]), None if shipped_ms is None else float(shipped_ms))


def check_choice(kind: ShapeClass, choice: Choice) -> None:
    """Raise ValueError if the kernels of a choice cannot run its class."""
    first = choice.cuda[0].kernel
    if (first == "forward") != (kind.direction == "forward") or (first == "dots32" and not kind.fits32):
        raise ValueError(f"{first} does not run {kind}")
