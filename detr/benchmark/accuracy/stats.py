"""What a few seeds can say about a difference of average precision, and no more than that."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean difference of a configuration from the base.

    Attributes:
        mean: Configuration minus base.
        low: Of its confidence interval.
        high: Likewise.
        num_pairs: Seeds that both have.
    """

    mean: float
    low: float
    high: float
    num_pairs: int

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


def pooled_difference(
    values: Mapping[int, float], base: Mapping[int, float], groups: Sequence[Mapping[int, float]]
) -> Difference | None:
    """Interval of the difference of means, if all configurations spread alike over seeds.

    The spread is taken over `groups` together, which knows it better than three pairs do. None where no group has two
    values.

    Args:
        values: By seed.
        base: By seed.
        groups: Values by seed of every configuration.
    """
    spread = pooled_spread(groups)
    if spread is None or not values or not base:
        return None
    deviation, degrees = spread
    mean = statistics.fmean(values.values()) - statistics.fmean(base.values())
    half = _quantile(degrees) * deviation * math.sqrt(1 / len(values) + 1 / len(base))
    return Difference(mean, mean - half, mean + half, min(len(values), len(base)))


def pooled_spread(groups: Sequence[Mapping[int, float]]) -> tuple[float, int] | None:
    """Standard deviation within groups, and its degrees of freedom; None without any."""
    degrees = sum(max(0, len(group) - 1) for group in groups)
    if not degrees:
        return None
    squares = sum(
        (value - statistics.fmean(group.values())) ** 2 for group in groups if group for value in group.values()
    )
    return math.sqrt(squares / degrees), degrees


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
