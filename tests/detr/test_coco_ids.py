"""Ids of JSON files: whole floats are integers, nothing else changes."""

import math

import pytest

from detr.coco_ids import whole_id


@pytest.mark.parametrize(("value", "expected"), [(1.0, 1), (-3.0, -3), (-0.0, 0), (2.0**53, 2**53), (7, 7)])
def test_whole_numbers_are_integers(value, expected):
    found = whole_id(value)
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize("value", [1.5, math.inf, -math.inf, 2.0**54, "1.0", "1", None, True, [1.0], {}])
def test_anything_else_stays_as_it_is(value):
    assert whole_id(value) is value


def test_nan_stays_a_float():
    assert math.isnan(whole_id(math.nan))
