"""What a run ran on: versions, GPUs, driver and commit; no host name, user or path."""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_DISTRIBUTIONS = (
    "deformable-detr",
    "torch",
    "torchvision",
    "triton",
    "timm",
    "numpy",
    "scipy",
    "pillow",
    "pycocotools",
    "faster-coco-eval",
    "hydra-core",
    "omegaconf",
    "wandb",
)
# what computes a step, of those above
_COMPUTING = ("torch", "torchvision", "triton", "timm", "numpy", "scipy", "pillow")
_COMMAND_TIMEOUT_S = 10


def collect_environment() -> dict[str, Any]:
    """Versions, hardware and the commit of this code, as plain JSON types.

    Returns:
        python, platform, cpu_count, versions (distribution -> version, None where absent), cuda, cudnn,
        driver (None without a GPU), gpus (name, memory_gib, compute_capability each) and git (commit, dirty
        for changed tracked files; None where this code is not in a git work tree, as in an installed wheel).
    """
    has_cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        # torch says which CUDA it is built for, which its package data does not
        "versions": {name: _version(name) for name in _DISTRIBUTIONS} | {"torch": torch.__version__},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_cuda else None,
        "driver": _driver_version() if has_cuda else None,
        "gpus": [_describe_gpu(index) for index in range(torch.cuda.device_count())] if has_cuda else [],
        "git": _git_state(Path(__file__)),
    }


def format_environment(environment: Mapping[str, Any], run: Mapping[str, object] | None = None) -> str:
    """The block printed once at start-up.

    Args:
        environment: From :func:`collect_environment`.
        run: Lines of the run itself, shown below: kernel, precision, images per step, output folder.
    """
    versions = environment["versions"]
    gpus = [f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in environment["gpus"]]
    git = environment["git"]
    lines = {
        "gpu": ", ".join(gpus) or f"none ({environment['cpu_count']} CPU cores)",
        "versions": ", ".join(
            [f"python {environment['python']}"]
            + [f"{name} {versions[name]}" for name in ("torch", "torchvision", "triton") if versions[name]]
            + ([f"cuda {environment['cuda']}"] if environment["cuda"] else [])
            + ([f"driver {environment['driver']}"] if environment["driver"] else [])
        ),
        "commit": "not in git" if git is None else git["commit"][:12] + (" + changes" if git["dirty"] else ""),
        **(run or {}),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def code_facts(*packages: ModuleType) -> dict[str, str | None]:
    """What computes a step, for a comparison: a hash of the sources of `packages`, and versions of what they use."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(package.__path__[0])
        for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cuh")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {name: _version(name) for name in _COMPUTING} | {"torch": torch.__version__}
    return {"sources": digest.hexdigest()[:12], **versions}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _driver_version() -> str | None:
    output = _command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return output.splitlines()[0].strip() if output else None


def _git_state(source: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the work tree that tracks `source`."""
    git = ["git", "-C", str(source.parent)]
    # a virtual environment inside some other repository must not report that repository's commit
    if not _command_output([*git, "ls-files", "--error-unmatch", source.name]):
        return None
    commit = _command_output([*git, "rev-parse", "HEAD"])
    if not commit:
        return None
    changes = _command_output([*git, "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit.strip(), "dirty": bool(changes)}


def _command_output(command: list[str]) -> str | None:
    """What a command prints; None when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return finished.stdout if finished.returncode == 0 else None
