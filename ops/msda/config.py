"""Which kernel runs, and how it accumulates."""

from dataclasses import dataclass
from typing import Literal, get_args

Backend = Literal["auto", "reference", "triton", "cuda"]
Accumulator = Literal["float32", "native"]


@dataclass(frozen=True)
class KernelConfig:
    """Choice of an MSDA kernel, handed down through constructors.

    Args:
        backend: `auto` picks the best backend for the tensors it is given and says once what it picked.
            Any other name runs that backend or raises `BackendUnavailable` with the reason.
        accumulator: Memory accumulator of the value gradient's scatter-add. `float32` sums in float32 and
            rounds once; `native` adds in the dtype of `value` (less memory traffic, less accurate).
            Sums in registers are float32 either way.
        deterministic: Bitwise equal results over reruns, at some cost in speed.

    Raises:
        ValueError: A name is not one of the above.
    """

    backend: Backend = "auto"
    accumulator: Accumulator = "float32"
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require_one_of("backend", self.backend, get_args(Backend))
        _require_one_of("accumulator", self.accumulator, get_args(Accumulator))
        if not isinstance(self.deterministic, bool):
            raise ValueError(
                f"KernelConfig.deterministic must be true or false, got {self.deterministic!r}; "
                "write kernel.deterministic=true or kernel.deterministic=false"
            )


def _require_one_of(field: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"KernelConfig.{field} must be one of {', '.join(allowed)}; got {given!r}")
