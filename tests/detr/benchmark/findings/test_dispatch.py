"""The dispatch orders without a GPU: what is permuted, compared and said."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from detr.benchmark.findings.dispatch_order import OrderCase, OrderRow, corrected, permuted, with_comparisons
from detr.benchmark.findings.dispatch_order_report import markdown, plot, verdict
from detr.benchmark.findings.orders import ORDERS, dispatch_order
from detr.benchmark.origin import Origin
from ops import ms_deform_attn
from ops.testing import Case, random_problem

ORIGIN = Origin("T", "python x", "gpu  H", "2026-01-02", "p.png")


def rows_of(slow=None, *, levels=4):
    """Rows of one case with timings of 32 repeats; `slow` takes a tenth longer."""
    rng = np.random.default_rng(0)
    rows = [OrderRow("cuda", "forward", "bf16", 2, levels, 4, order, "ok", True) for order in ORDERS]
    samples = {order: (rng.normal(1, 0.01, 32) * (1.1 if order == slow else 1)).tolist() for order in ORDERS}
    return with_comparisons(rows, samples)


def test_permuted_queries_give_permuted_outputs():
    shapes = ((4, 5), (2, 3))
    problem, _ = random_problem(Case(N=2, Lq=26, M=2, D=4, shapes=shapes), torch.float32)
    order = torch.from_numpy(dispatch_order("hilbert", shapes))
    plain = ms_deform_attn(problem.value, shapes, problem.locations, problem.weights)
    turned = permuted(problem, order)
    given = ms_deform_attn(turned.value, shapes, turned.locations, turned.weights)
    assert not torch.equal(given, plain)
    torch.testing.assert_close(given[:, order.argsort()], plain)


def test_linear_is_compared_with_nothing():
    rows = corrected(rows_of("random"))
    linear = rows[0]
    assert (linear.ratio, linear.p_value, linear.p_holm, linear.distinguishable) == (1, None, None, False)
    assert [row.order for row in rows if row.distinguishable] == ["random"]
    slow = next(row for row in rows if row.order == "random")
    assert slow.ratio == pytest.approx(1.1, abs=0.01)
    assert slow.p_holm == pytest.approx((slow.p_value or 0) * 6)


def test_the_correction_counts_all_cases_of_a_run():
    rows = corrected(rows_of("random") + rows_of(levels=2))
    slow = next(row for row in rows if row.order == "random")
    assert slow.p_holm == pytest.approx((slow.p_value or 0) * 12)


def test_verdict_and_report(tmp_path):
    same, differ = corrected(rows_of()), corrected(rows_of("random") + rows_of(levels=2))
    assert verdict(same) == "reproduced: cuda forward: 0 of 6 comparisons differ from linear"
    assert verdict(differ).startswith("different: cuda forward: 1 of 12 comparisons differ from linear, 1.10")
    text = markdown(differ, ORIGIN)
    (line,) = [line for line in text.splitlines() if line.startswith("| 4 | 4 | ")]
    assert line.count("**") == 2
    assert "Verdict: different" in text
    failed = [replace(row, status="error bound missed: output", ratio=None, median_ms=None) for row in same]
    assert verdict(failed).startswith("open")
    assert "error bound missed" in markdown(failed, ORIGIN)
    plot(differ, tmp_path / "p.png", title="T")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_a_case_that_is_not_timed_is_refused():
    with pytest.raises(ValueError, match=r"orders are timed in cuda forward.*got point_parallel backward"):
        OrderCase("point_parallel", "backward", "bf16", 2, 4, 4)
