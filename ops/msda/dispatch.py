"""From the name of a backend to the code that runs it."""

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from ops.msda.config import Accumulator, KernelConfig
from ops.msda.problem import Problem, named_dtypes
from ops.msda.tuning.device import choice_of, device_tuning
from ops.msda.tuning.shape_class import sums_of

logger = logging.getLogger("ops")

# name -> module with unavailable_reason, unsupported_reason, forward and backward; of those that can run, `auto`
# takes the winner of the shape class, the first if the table names none of them
_MODULES = {"cuda": "ops.msda.cuda.backend", "triton": "ops.msda.triton.backend"}


class BackendUnavailable(RuntimeError):
    """A backend that was named cannot run here. The message says why and what to do."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run on this machine.

    Attributes:
        available: True if the backend can run.
        reason: Why not, or what it runs on.
    """

    available: bool
    reason: str


def backends() -> dict[str, BackendStatus]:
    """What can run on this machine, by backend name, and why the rest cannot."""
    statuses = {"reference": BackendStatus(True, "plain PyTorch, any device and floating dtype")}
    for name in sorted(_MODULES, reverse=True):
        reason = backend_module(name).unavailable_reason()
        statuses[name] = BackendStatus(reason is None, reason or backend_module(name).RUNS_ON)
    return statuses


@cache
def backend_module(name: str) -> ModuleType:
    """The module of a kernel backend, imported on first use."""
    return import_module(_MODULES[name])


def resolve(kernel: KernelConfig, problem: Problem) -> str:
    """The backend that runs a problem: what `kernel` names, or for `auto` the fastest that can.

    Only devices, dtypes and the number of levels are looked at. Where a tuned table has different winners for
    different shape classes, it stays `auto`, and `forward_backend` and `backward_backend` decide for each call.

    Raises:
        BackendUnavailable: `kernel` names a backend that cannot run on this machine or in this dtype.
        ValueError: `kernel` names a GPU backend, and the tensors are on another device.
    """
    value, shapes, locations, weights, reference_points, _ = problem
    device = value.device
    points_dtype = None if reference_points is None else reference_points.dtype
    dtypes = (value.dtype, locations.dtype, weights.dtype, points_dtype)
    return _resolve(kernel.backend, device.type, device.index, dtypes, len(shapes))


# a constant to torch.compile: nothing in here depends on values or sizes that change from batch to batch
@torch.compiler.assume_constant_result
def _resolve(
    backend: str,
    device_type: str,
    device_index: int | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    num_levels: int,
) -> str:
    return _resolve_once(backend, device_type, device_index, dtypes, num_levels)


@cache
def _resolve_once(
    backend: str,
    device_type: str,
    device_index: int | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    num_levels: int,
) -> str:
    if backend == "reference":
        return backend
    named = named_dtypes(*dtypes)
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    if backend != "auto":
        module = backend_module(backend)
        reason = module.unavailable_reason()
        if reason is not None:
            raise BackendUnavailable(f"kernel={backend} was asked for, but {reason}. kernel=reference runs anywhere")
        reason = module.unavailable_reason(device)
        if reason is not None:
            raise ValueError(f"value must be where kernel={backend} can run, but {reason}")
        reason = module.unsupported_reason(named, num_levels)
        if reason is not None:
            raise BackendUnavailable(
                f"kernel={backend} was asked for, but {reason}. Use kernel=reference or kernel=auto"
            )
        return backend
    if device_type != "cuda":
        return "reference"
    runnable, reasons = runnable_backends(device, named, num_levels)
    if not runnable:
        _say_once(logging.WARNING, f"kernel=auto runs the slow reference on {device}", *reasons)
        return "reference"
    assert device_index is not None
    tuning = device_tuning(device_index)
    winners = tuning.backends() & set(runnable) or {runnable[0]}
    if len(winners) > 1:
        _say_once(logging.INFO, f"kernel=auto runs what won the shape class on {device}, {tuning.source}", *reasons)
        return backend
    (winner,) = winners
    _say_once(logging.INFO, f"kernel=auto runs {winner} on {device}", *reasons)
    return winner


def runnable_backends(
    device: torch.device, named: tuple[tuple[str, torch.dtype], ...], num_levels: int
) -> tuple[list[str], list[str]]:
    """The kernel backends that can run tensors of these names and dtypes, and why the others cannot."""
    runnable, reasons = [], []
    for name in _MODULES:
        module = backend_module(name)
        reason = (
            module.unavailable_reason()
            or module.unavailable_reason(device)
            or module.unsupported_reason(named, num_levels)
        )
        if reason is None:
            runnable.append(name)
        else:
            reasons.append(f"not {name}: {reason}")
    return runnable, reasons


def forward_backend(name: str, problem: Problem) -> ModuleType:
    """The module that runs the forward pass, for a name that `resolve` returned."""
    if name == "auto":
        name = choice_of(problem, "forward", None).backend
    return backend_module(name)


def backward_backend(name: str, problem: Problem, accumulator: Accumulator, deterministic: bool) -> ModuleType:
    """The module that runs the backward pass, for a name that `resolve` returned."""
    if name == "auto":
        name = choice_of(problem, "backward", sums_of(problem.value.dtype, accumulator, deterministic)).backend
    return backend_module(name)


@cache
def _say_once(level: int, *parts: str) -> None:
    logger.log(level, "; ".join(parts))
