"""What a few seeds can say about a difference."""

import math
import statistics

import numpy as np
import pytest

from detr.benchmark.accuracy.stats import AdditiveFit, difference_sentence, paired_difference


def test_the_paired_interval_is_students():
    base, other = {0: 0.50, 1: 0.52, 2: 0.54, 9: 0.1}, {0: 0.51, 1: 0.54, 2: 0.55, 8: 0.9}
    found = paired_difference(other, base)
    differences = [0.01, 0.02, 0.01]
    half = 4.302653 * statistics.stdev(differences) / math.sqrt(3)
    assert found is not None
    assert (found.mean, found.num_runs) == (pytest.approx(statistics.fmean(differences)), 3)
    assert found.half_width == pytest.approx(half, rel=1e-5)
    assert paired_difference({0: 1.0}, base) is None


def test_the_fit_of_two_is_the_paired_interval():
    base, other = {0: 0.50, 1: 0.52, 2: 0.54}, {0: 0.51, 1: 0.54, 2: 0.55}
    found, paired = AdditiveFit({"a": base, "b": other}).difference("b", "a"), paired_difference(other, base)
    assert found is not None
    assert paired is not None
    assert (found.mean, found.low, found.high) == pytest.approx((paired.mean, paired.low, paired.high))


def test_the_fit_of_many_knows_their_noise_and_what_seeds_share():
    # 4 configurations x 3 seeds by hand: residuals are what configuration and seed means leave
    values = np.array([[0.50, 0.53, 0.51], [0.51, 0.54, 0.53], [0.50, 0.52, 0.51], [0.52, 0.54, 0.52]])
    groups = {name: dict(enumerate(row)) for name, row in zip("abcd", values.tolist(), strict=True)}
    fit = AdditiveFit(groups)
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    assert fit.degrees == 6
    assert fit.deviation == pytest.approx(math.sqrt((rest**2).sum() / 6))
    found = fit.difference("b", "a")
    assert found is not None
    assert found.mean == pytest.approx(values[1].mean() - values[0].mean())
    assert found.half_width == pytest.approx(2.446912 * fit.deviation * math.sqrt(2 / 3), rel=1e-5)
    # what a seed does to all changes nothing
    shifted = {name: {seed: value + seed for seed, value in group.items()} for name, group in groups.items()}
    same = AdditiveFit(shifted).difference("b", "a")
    assert same is not None
    assert (same.mean, same.low, same.high) == pytest.approx((found.mean, found.low, found.high))


def test_a_run_that_is_missing_does_not_lend_its_seed_to_a_difference():
    # seed 1 is worth 0.1 to all; the mean of what is there would give -0.03
    groups = {"a": {0: 0.50, 1: 0.60}, "b": {0: 0.52}, "c": {0: 0.51, 1: 0.61}}
    found = AdditiveFit(groups).difference("b", "a")
    assert found is not None
    assert found.mean == pytest.approx(0.02)


def test_what_no_runs_can_tell_is_no_difference():
    assert AdditiveFit({}).difference("a", "b") is None
    assert AdditiveFit({"a": {0: 0.5}, "b": {0: 0.6}}).difference("b", "a") is None
    # no seed links b with the others
    apart = AdditiveFit({"a": {0: 0.5, 1: 0.6}, "c": {0: 0.5, 1: 0.7}, "b": {5: 0.6, 6: 0.7}})
    assert apart.degrees == 1
    assert apart.difference("b", "a") is None
    assert apart.difference("c", "a") is not None
    assert apart.difference("none", "a") is None


def test_sentences_say_no_more_than_the_interval():
    same = paired_difference({0: 0.5, 1: 0.51, 2: 0.52}, {0: 0.51, 1: 0.50, 2: 0.525})
    worse = paired_difference({0: 0.40, 1: 0.411, 2: 0.42}, {0: 0.5, 1: 0.51, 2: 0.52})
    assert same is not None
    assert worse is not None
    text = difference_sentence("a", "b", same)
    limit = max(abs(same.low), abs(same.high))
    assert "cannot be told apart" in text
    assert f"more than {limit:.4f} AP is unlikely, a smaller one is possible" in text
    assert "has a lower AP than `b`" in difference_sentence("a", "b", worse)
