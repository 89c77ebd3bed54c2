"""Problems that want the same launch shapes. Image sizes are no part of it: they change from batch to batch."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ops.msda.config import Accumulator

Direction = Literal["forward", "backward"]
Sums = Literal["float32", "native", "fixed"]
Regime = Literal["encoder", "decoder", "other"]

# (query, head) pairs a multiprocessor below which launches and tails count more than the work
DECODER_PAIRS = 256


@dataclass(frozen=True)
class ShapeClass:
    """What launch shapes are chosen by.

    Attributes:
        direction: forward | backward.
        value_bytes: Of one element of value: 2 or 4.
        sums: What value gradients are summed in; None for the forward pass.
        regime: decoder: fewer than 256 (query, head) pairs a multiprocessor; encoder: more, and as many queries as
            cells; other: the rest.
        head_dim: D.
        fits32: Whether the kernels for D = 32 can run it.
    """

    direction: Direction
    value_bytes: int
    sums: Sums | None
    regime: Regime
    head_dim: int
    fits32: bool

    def __post_init__(self) -> None:
        for name, allowed in (
            ("direction", get_args(Direction)),
            ("value_bytes", (2, 4)),
            ("sums", (None,) if self.direction == "forward" else get_args(Sums)),
            ("regime", get_args(Regime)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {getattr(self, name)!r}")
        if type(self.head_dim) is not int or self.head_dim < 1 or type(self.fits32) is not bool:
            raise ValueError(f"head_dim must be a positive integer and fits32 a bool; got {self}")

    def __str__(self) -> str:
        sums = "" if self.sums is None else f", sums {self.sums}"
        general = "" if self.fits32 or self.head_dim != 32 else ", other points"
        return f"{self.direction}, {self.regime}, {8 * self.value_bytes} bit{sums}, D = {self.head_dim}{general}"


def shape_class(
    direction: Direction,
    value_dtype: torch.dtype,
    value_shape: tuple[int, ...],
    Lq: int,
    spatial_shapes: tuple[tuple[int, int], ...],
    P: int,
    sums: Sums | None,
    multiprocessors: int,
) -> ShapeClass:
    """The class of a problem on a device with so many multiprocessors; shapes as in `ops.ms_deform_attn`."""
    N, S, M, D = value_shape
    regime: Regime = "encoder" if Lq == S else "other"
    if N * M * Lq < multiprocessors * DECODER_PAIRS:
        regime = "decoder"
    fits32 = D == 32 and P % 4 == 0 and len(spatial_shapes) * P <= 128
    return ShapeClass(direction, value_dtype.itemsize, sums, regime, D, fits32)


def sums_of(value_dtype: torch.dtype, accumulator: Accumulator, deterministic: bool) -> Sums:
    """What value gradients are summed in: float32 is its own native dtype."""
    if deterministic:
        return "fixed"
    return "float32" if value_dtype == torch.float32 else accumulator
