"""Orders of queries, and the statistics that compare them."""

import numpy as np
import pytest

from detr.benchmark.findings.orders import ORDERS, dispatch_order, hilbert_index, morton_index
from detr.benchmark.findings.paired import compare_paired, holm

SHAPES = ((13, 21), (7, 11), (4, 5), (1, 3), (1, 1))


def cells_of(order, H, W):
    """(x, y) of each place on a single level."""
    return np.stack((order % W, order // W), axis=1)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shapes", [SHAPES, ((8, 8),), ((100, 167), (50, 84)), ((1, 17),), ((17, 1),)])
def test_every_order_is_a_permutation(name, shapes):
    order = dispatch_order(name, shapes)
    assert sorted(order.tolist()) == list(range(sum(H * W for H, W in shapes)))


def test_no_two_orders_are_the_same():
    orders = {tuple(dispatch_order(name, SHAPES).tolist()) for name in ORDERS}
    assert len(orders) == len(ORDERS)


@pytest.mark.parametrize("name", ["morton", "hilbert", "column_major", "tiled_8x8"])
def test_curves_stay_within_their_level(name):
    order, start = dispatch_order(name, SHAPES), 0
    for H, W in SHAPES:
        assert set(order[start : start + H * W]) == set(range(start, start + H * W))
        start += H * W


def test_linear_reversed_and_random():
    assert dispatch_order("linear", SHAPES).tolist() == list(range(374))
    assert dispatch_order("reversed", SHAPES).tolist() == list(range(373, -1, -1))
    np.testing.assert_array_equal(dispatch_order("random", SHAPES), dispatch_order("random", SHAPES))
    assert (dispatch_order("random", SHAPES, seed=1) != dispatch_order("random", SHAPES)).any()


def test_column_major_goes_down():
    assert dispatch_order("column_major", ((2, 3),)).tolist() == [0, 3, 1, 4, 2, 5]


def test_tiles_are_rows_of_tiles_each_row_major():
    cells = cells_of(dispatch_order("tiled_8x8", ((10, 19),)), 10, 19)
    assert cells[:9].tolist() == [[x, 0] for x in range(8)] + [[0, 1]]
    assert cells[64].tolist() == [8, 0]
    # the third tile is three cells wide, the second row of tiles two cells high
    assert cells[128:132].tolist() == [[16, 0], [17, 0], [18, 0], [16, 1]]
    assert cells[10 * 19 - 1].tolist() == [18, 9]


def test_morton_is_bits_in_turns():
    x, y = np.array([0b1011, 0, 5]), np.array([0b0110, 1, 3])
    assert morton_index(x, y).tolist() == [0b01101101, 0b10, 0b011011]
    cells = cells_of(dispatch_order("morton", ((4, 4),)), 4, 4)
    assert cells[:5].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0]]


@pytest.mark.parametrize("side", [1, 2, 4, 16, 64])
def test_neighbours_on_the_hilbert_curve_touch(side):
    cells = cells_of(dispatch_order("hilbert", ((side, side),)), side, side)
    assert (np.abs(np.diff(cells, axis=0)).sum(1) == 1).all()
    assert cells[0].tolist() == [0, 0]


@pytest.mark.parametrize(("H", "W"), [(13, 21), (50, 84), (5, 64)])
def test_hilbert_on_another_map_is_the_curve_without_what_is_off_it(H, W):
    side = 1 << (max(H, W) - 1).bit_length()
    y, x = (axis.ravel() for axis in np.meshgrid(np.arange(side), np.arange(side), indexing="ij"))
    whole = np.argsort(hilbert_index(x, y, side=side))
    on_map = [(x[i], y[i]) for i in whole if x[i] < W and y[i] < H]
    assert cells_of(dispatch_order("hilbert", ((H, W),)), H, W).tolist() == [list(cell) for cell in on_map]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match=r"order must be one of linear, reversed.*got 'zigzag'"):
        dispatch_order("zigzag", SHAPES)


class TestStatistics:
    def test_wilcoxon_of_differences_with_one_sign(self):
        # the most extreme of 2^5 sign patterns, two-sided
        result = compare_paired([1.1, 2.2, 3.3, 4.4, 5.5], [1.0, 2.0, 3.0, 4.0, 5.0])
        assert result.p_value == pytest.approx(2 / 32)
        assert result.ratio == pytest.approx(1.1)

    def test_wilcoxon_by_hand(self):
        # ranks of |difference| 1, 2, 3, 4 with only the smallest negative: W = 1, which 2 of 16 patterns reach
        result = compare_paired([9.0, 12.0, 13.0, 14.0], [10.0] * 4)
        assert result.p_value == pytest.approx(2 * 2 / 16)

    def test_equal_timings_are_not_different(self):
        assert compare_paired([2.0, 3.0], [2.0, 3.0]) == compare_paired([1.0], [1.0])
        assert compare_paired([2.0, 3.0], [2.0, 3.0]).p_value == 1

    def test_pairs_must_be_pairs(self):
        for given in (([1.0], [1.0, 2.0]), ([], [])):
            with pytest.raises(ValueError, match="paired timings need as many of each"):
                compare_paired(*given)

    def test_holm_by_hand(self):
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
        assert holm([0.5, 0.9]) == [1.0, 1.0]
        assert holm([0.02]) == [0.02]
        assert holm([]) == []

    def test_noise_alone_is_seldom_called_different(self):
        rng = np.random.default_rng(0)
        false_alarms = 0
        for _ in range(40):
            linear = rng.normal(1, 0.01, 30)
            p_values = [compare_paired(rng.normal(1, 0.01, 30).tolist(), linear.tolist()).p_value for _ in range(6)]
            false_alarms += min(holm(p_values)) < 0.05
        assert false_alarms <= 6

    def test_a_shift_of_a_percent_is_found_below_a_noise_of_a_percent(self):
        rng = np.random.default_rng(0)
        linear = rng.normal(1, 0.01, 30)
        slower = compare_paired((linear * 1.01 + rng.normal(0, 0.002, 30)).tolist(), linear.tolist())
        assert holm([slower.p_value] * 216)[0] < 0.05
