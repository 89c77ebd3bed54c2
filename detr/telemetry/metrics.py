"""Scalars of the training step, averaged on their device and read only when asked."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Sums:
    """The sums of scalars that were added together, as one vector: 3 names cost as much as 30."""

    names: tuple[str, ...]
    sums: Tensor
    count: int


class RunningMean:
    """Mean of named scalars since the last reset, or over the last `window` additions.

    `add` launches two small kernels and never waits for the device; `read` copies once. Under several ranks
    pass `detr.distributed.all_reduce_mean` to `read`; all ranks must then have added the same names as often.

    Args:
        window: Additions to average over, to smooth a displayed value. None: all since the last reset.
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 addition, or None for all; got {window}")
        self._recent: deque[list[_Sums]] | None = None if window is None else deque(maxlen=window)
        # by names, and whether they are on a device
        self._totals: dict[tuple[tuple[str, ...], bool], _Sums] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one value for each name; names may come and go between additions.

        Args:
            values: Scalar tensors (on one device, of any real dtype; their gradient is dropped) or numbers.

        Raises:
            ValueError: A tensor has more than one element.
        """
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.numel() != 1:
                raise ValueError(f"metric {name} must be a scalar; got shape {tuple(tensor.shape)}")
        added = []
        if tensors:
            scalars = [tensor.detach().reshape(()).float() for tensor in tensors.values()]
            added.append(_Sums(tuple(tensors), torch.stack(scalars), 1))
        if numbers:
            added.append(_Sums(tuple(numbers), torch.tensor(list(map(float, numbers.values()))), 1))
        if self._recent is not None:
            self._recent.append(added)
            return
        for new in added:
            key = (new.names, new.sums.device.type == "cpu")
            old = self._totals.get(key)
            self._totals[key] = new if old is None else _Sums(new.names, old.sums + new.sums, old.count + new.count)

    def read(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """The mean of each name over the additions that held it; empty when nothing was added.

        Waits for the device once.

        Args:
            reduce: Linear map applied to the sums (a float32 vector on the device of the added tensors)
                before they are copied, as `all_reduce_mean`.
        """
        parts = list(self._totals.values())
        if self._recent is not None:
            parts = [part for added in self._recent for part in added]
        if not parts:
            return {}
        devices = [part.sums.device for part in parts]
        # numbers travel to the tensors' device, where collectives run
        device = next((device for device in devices if device.type != "cpu"), devices[0])
        sums = torch.cat([part.sums.to(device, non_blocking=True) for part in parts])
        if reduce is not None:
            sums = reduce(sums)
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        names_and_counts = [(name, part.count) for part in parts for name in part.names]
        for (name, count), total in zip(names_and_counts, sums.tolist(), strict=True):
            totals[name] = totals.get(name, 0.0) + total
            counts[name] = counts.get(name, 0) + count
        return {name: total / counts[name] for name, total in totals.items()}

    def reset(self) -> None:
        """Forget everything added."""
        self._totals.clear()
        if self._recent is not None:
            self._recent.clear()
