"""The table of the GPU at hand: the shipped one, overridden by what was tuned on this machine."""

import logging
from functools import cache, lru_cache
from pathlib import Path

import torch

from ops.msda.cache_dir import cache_dir
from ops.msda.problem import Problem
from ops.msda.tuning.launch_shape import Choice
from ops.msda.tuning.shape_class import Direction, Sums, shape_class
from ops.msda.tuning.shipped import is_measured, shipped_tuning
from ops.msda.tuning.store import TuningFileError, read_tuning, tuning_path
from ops.msda.tuning.table import Device, Row, Tuning

logger = logging.getLogger("ops")


def choice_of(problem: Problem, direction: Direction, sums: Sums | None) -> Choice:
    """What the table of a problem's GPU has for it; asked once for its sizes."""
    value, spatial_shapes, locations, *_ = problem
    return choice_for(
        direction, value.dtype, value.shape, problem.Lq, spatial_shapes, locations.shape[4], sums, value.device.index
    )


@lru_cache(maxsize=1024)
def choice_for(
    direction: Direction,
    value_dtype: torch.dtype,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    P: int,
    sums: Sums | None,
    device_index: int,
) -> Choice:
    """`choice_of` by the sizes of a problem."""
    multiprocessors = visible_device(device_index).multiprocessors
    kind = shape_class(direction, value_dtype, value_shape, Lq, spatial_shapes, P, sums, multiprocessors)
    return device_tuning(device_index).choice(kind)


@cache
def device_tuning(device_index: int) -> Tuning:
    """The table of a visible GPU, read once a process."""
    return tuning_of(visible_device(device_index), cache_dir())


@cache
def visible_device(device_index: int) -> Device:
    properties = torch.cuda.get_device_properties(device_index)
    # what every GPU has without opting in, where torch does not say more (AMD)
    max_shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    capability = (properties.major, properties.minor)
    return Device(properties.name, capability, properties.multi_processor_count, max_shared)


def tuning_of(device: Device, folder: Path) -> Tuning:
    """The shipped table of a GPU model, and before it what the cache folder holds for it.

    A file that cannot be used is left out, with one warning.
    """
    shipped = shipped_tuning(device)
    path = tuning_path(device, folder)
    try:
        tuned = read_tuning(path, device)
    except FileNotFoundError:
        if not is_measured(device):
            logger.info(
                "launch shapes for %s are careful guesses: python tools/tune_ops.py finds the fastest", device.name
            )
        return shipped
    except TuningFileError as error:
        logger.warning(
            "tuned launch shapes in %s are not used: %s. The shipped ones are; python tools/tune_ops.py measures "
            "anew, deleting the file ends this message",
            path,
            error,
        )
        return shipped
    logger.info("launch shapes of %d shape classes come from %s", len(tuned.classes), path)
    rows = tuple(Row.exactly(entry.kind, entry.choice) for entry in tuned.classes)
    return Tuning(rows + shipped.rows, f"tuned ({path.name}, {tuned.versions.get('date', 'no date')})")
