"""Comparison of the growth of memory within launches with that of the other side."""

import pytest

from pytest_aorta.verdict.metrics import METRICS
from tests.unit.builders import PASS, REGRESSION, baseline_of, each_of, growing, make_facts, on_cpu
from tests.unit.verdict.compared import check, compare

# Growth of each rank in the recorded launches and in those under test -> the outcome.
GROWTH = {
    "none": ([[0.0, 0.0]], [[0.0, 0.0]], PASS),
    "noise": ([[0.0, 0.0]], [[0.048, 0.09]], PASS),
    "leak": ([[0.0, 0.0]], [[0.0, 0.11]], REGRESSION),
    "leak on the other rank": ([[0.5, 0.0]], [[0.5, 0.5]], REGRESSION),
    "leak in the baseline": ([[0.0, 1.0]], [[0.0, 1.2]], PASS),
    "larger leak than in the baseline": ([[0.0, 1.0]], [[0.0, 1.3]], REGRESSION),
    "largest of the baseline": ([[0.2], [0.0]], [[0.29]], PASS),
    "one of two launches": ([[0.0]], [[0.5], [0.0]], PASS),
    "less": ([[0.7]], [[0.0]], PASS),
}


@each_of("recorded, measured, outcome", GROWTH)
def test_growth_of_a_rank_may_exceed_that_of_the_baseline_by_ten_points_or_a_quarter(recorded, measured, outcome):
    there, here = ([make_facts(**growing(*ranks)) for ranks in side] for side in (recorded, measured))
    row = check(*here, baseline=baseline_of(*there))["memory_growth"]
    assert row.outcome is outcome


@pytest.mark.parametrize(("grows", "outcome"), [(0.019, PASS), (0.021, REGRESSION)])
def test_what_malloc_gives_out_on_cpu_ranks_may_grow_by_two_points_more(grows, outcome):
    there, here = (on_cpu(**growing(more)) for more in (0.0, grows))
    assert check(here, baseline=baseline_of(there))["memory_growth"].outcome is outcome


def test_growth_names_the_rank_and_the_growth_of_a_step():
    there, here = make_facts(**growing(0.0, 0.01)), make_facts(**growing(0.0, 0.5))
    row = check(here, baseline=baseline_of(there))["memory_growth"]
    assert row.detail.startswith("memory of rank 1 grows by 5 MiB a step, that of the baseline by 0.1 MiB; ")
    assert (row.value, row.baseline) == (0.5, 0.01)


def test_marker_is_applied_as_written():
    there, here = make_facts(**growing(1.0)), make_facts(**growing(1.06))
    marked = {"memory_growth": METRICS["memory_growth"].parse_tolerance("5 points")}
    baseline = baseline_of(there)
    assert check(here, baseline=baseline, marked=marked)["memory_growth"].outcome is REGRESSION


def test_variants_of_a_test_may_grow_differently():
    rows = compare([make_facts(**growing(0.5))], [make_facts(**growing(0.0))]).rows
    assert "memory_growth" not in {row.metric for row in rows}
