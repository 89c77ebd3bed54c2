"""What a few seeds can say about a difference of average precision, and no more than that."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean difference of a configuration from the base.

    Attributes:
        mean: Configuration minus base.
        low: Of its confidence interval.
        high: Likewise.
        num_runs: Seeds of the one that has fewer.
    """

    mean: float
    low: float
    high: float
    num_runs: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.low <= 0 <= self.high


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Student's t interval of the differences of equal seeds; None with fewer than two.

    Args:
        values: By seed.
        base: By seed.
    """
    differences = [values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    half = _quantile(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half, len(differences))


class AdditiveFit:
    """A value is that of its configuration, plus what its seed does to all of them, plus noise: least squares.

    Configurations are compared with what seeds share taken out, and with the noise of all of them, which is known
    better than that of three pairs. Of two configurations with the same seeds it is the paired interval.

    Args:
        groups: Values by seed, by configuration; those without values are left out.

    Attributes:
        deviation: Standard deviation of the noise, taken to be alike everywhere; NaN without degrees of freedom.
        degrees: Of freedom of that.
    """

    def __init__(self, groups: Mapping[str, Mapping[int, float]]) -> None:
        runs = [(name, seed, value) for name, group in groups.items() for seed, value in group.items()]
        self._num_runs = {name: len(group) for name, group in groups.items() if group}
        columns = [*self._num_runs, *sorted({seed for _, seed, _ in runs})]
        self._column_of = {column: index for index, column in enumerate(columns)}
        design = np.zeros((len(runs), len(columns)))
        for index, (name, seed, _) in enumerate(runs):
            design[index, [self._column_of[name], self._column_of[seed]]] = 1
        values = np.array([value for *_, value in runs])
        self._inverse = np.linalg.pinv(design)
        self._estimable = self._inverse @ design
        self._effects = self._inverse @ values
        self.degrees = len(runs) - int(np.linalg.matrix_rank(design)) if runs else 0
        squares = float(np.sum((values - design @ self._effects) ** 2))
        self.deviation = math.sqrt(squares / self.degrees) if self.degrees else math.nan

    def difference(self, name: str, base: str) -> Difference | None:
        """Interval of a configuration minus another; None where there are too few runs, or no seeds that link them."""
        if not self.degrees or name not in self._num_runs or base not in self._num_runs:
            return None
        contrast = np.zeros(len(self._column_of))
        contrast[self._column_of[name]] += 1
        contrast[self._column_of[base]] -= 1
        if not np.allclose(contrast @ self._estimable, contrast):
            return None
        mean = float(contrast @ self._effects)
        half = _quantile(self.degrees) * self.deviation * float(np.linalg.norm(contrast @ self._inverse))
        return Difference(mean, mean - half, mean + half, min(self._num_runs[name], self._num_runs[base]))


def difference_sentence(name: str, base: str, difference: Difference, *, unit: str = "AP") -> str:
    """What the interval supports: an effect with its range, or which effects are excluded."""
    percent = round(100 * CONFIDENCE)
    span = f"{difference.low:+.4f} to {difference.high:+.4f}"
    if difference.is_told_apart:
        direction = "higher" if difference.mean > 0 else "lower"
        return f"`{name}` has a {direction} {unit} than `{base}`: {difference.mean:+.4f} ({percent}% interval {span})."
    limit = max(abs(difference.low), abs(difference.high))
    return (
        f"`{name}` cannot be told apart from `{base}` ({difference.mean:+.4f}, {percent}% interval {span}); a "
        f"difference of more than {limit:.4f} {unit} is unlikely, a smaller one is possible."
    )


def _quantile(degrees: int) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, degrees))
