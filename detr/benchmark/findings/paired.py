"""Whether timings that were taken in turns differ: paired tests, corrected for their number."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import wilcoxon


@dataclass(frozen=True)
class Paired:
    """One alternative against a baseline, repeat by repeat.

    Attributes:
        ratio: Median of alternative over baseline.
        p_value: Of Wilcoxon's signed-rank test, two-sided; of one comparison alone.
    """

    ratio: float
    p_value: float


def compare_paired(alternative_ms: Sequence[float], baseline_ms: Sequence[float]) -> Paired:
    """Compare timings of the same repeats.

    Raises:
        ValueError: They differ in number, or there are none.
    """
    if len(alternative_ms) != len(baseline_ms) or not baseline_ms:
        raise ValueError(
            f"paired timings need as many of each, at least one; got {len(alternative_ms)} and {len(baseline_ms)}"
        )
    pairs = list(zip(alternative_ms, baseline_ms, strict=True))
    ratio = median(a / b for a, b in pairs)
    differences = [a - b for a, b in pairs]
    if not any(differences):
        # nothing to rank
        return Paired(ratio, 1.0)
    return Paired(ratio, float(wilcoxon(differences).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's method, in the order given.

    Whoever calls those below alpha different is wrong about any of them with probability alpha at most.
    """
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(ascending):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
