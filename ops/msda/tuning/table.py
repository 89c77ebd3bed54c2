"""The table of one GPU: from a shape class to what runs it."""

from dataclasses import asdict, dataclass

from ops.msda.tuning.launch_shape import Choice
from ops.msda.tuning.shape_class import Direction, Regime, ShapeClass, Sums


@dataclass(frozen=True)
class Device:
    """What a table is made for.

    Attributes:
        name: As the driver says it.
        capability: Compute capability.
        multiprocessors: Their number.
        max_shared: Bytes of shared memory a block may opt into.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    max_shared: int


@dataclass(frozen=True)
class Row:
    """A line of a table: the classes it matches, fields of `ShapeClass` of which None matches all, and their choice."""

    choice: Choice
    direction: Direction | None = None
    value_bytes: int | None = None
    sums: Sums | None = None
    regime: Regime | None = None
    head_dim: int | None = None
    fits32: bool | None = None

    @classmethod
    def exactly(cls, kind: ShapeClass, choice: Choice) -> "Row":
        return cls(choice, **asdict(kind))

    def matches(self, kind: ShapeClass) -> bool:
        return all(getattr(self, name) in (None, given) for name, given in asdict(kind).items())


@dataclass(frozen=True)
class Tuning:
    """Rows in order; the first that matches decides.

    Attributes:
        rows: The last of them match whatever comes.
        source: Where they are from, for messages and reports; None for the package.
    """

    rows: tuple[Row, ...]
    source: str | None = None

    def choice(self, kind: ShapeClass) -> Choice:
        return next(row.choice for row in self.rows if row.matches(kind))

    def backends(self) -> set[str]:
        """Those that win at least one class."""
        return {row.choice.backend for row in self.rows}
