"""A regression of step time, split into parts that add up to it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.result.trace.breakdown import Part
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.causes import Split, split
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import default_priors, launches_near, make_baseline, make_facts, stored

USUAL = {"compute": 8.0, "straggler": 0.0, "exposed_comm": 1.0, "copy": 0.5, "idle": 0.5}
CHANGED = {"compute": 10.0, "straggler": 8.1, "exposed_comm": 2.9, "copy": 0.5, "idle": 0.8}
RESET = "--update-baselines --aorta-reset-baselines"


def launches(p50: float, count: int, parts: dict[str, float] | None, rank: int | None = 0, **changes):
    return launches_near(p50, count, deviation=0.0001, breakdown_ms=parts or {}, critical_rank=rank, **changes)


def check(here, there) -> Verdicts:
    baseline = make_baseline(launches=stored(*there))
    return StoredComparison("case", baseline.config, baseline, {}, default_priors, len(here)).judge(here)


def test_regression_names_the_parts_and_the_critical_rank():
    verdicts = check(launches(22.4, 3, CHANGED, rank=1), launches(10.0, 10, USUAL))
    assert verdicts["step_time_p50"].outcome is Outcome.REGRESSION
    assert verdicts.notes == (
        "step_time_p50: split of +12.4 ms on rank 1, the critical rank: compute +2.0, straggler's extra compute +8.1, "
        "exposed communication +1.9, device idle (host) +0.3, rest +0.1",
    )


def test_pairs_with_a_reference_are_split_too():
    here, there = launches(22.4, 6, CHANGED, rank=None), launches(10.0, 6, USUAL, rank=None)
    (note,) = PairedComparison("case", {}, default_priors, None, 6).judge(here, there).notes
    assert note.startswith("step_time_p50: split of +12.4 ms: compute +2.0, ")


def test_copies_are_named_within_the_rest():
    found = split(3.0, launches(13.0, 3, USUAL | {"copy": 3.0}), launches(10.0, 3, USUAL))
    assert str(found) == "split of +3.00 ms on rank 0, the critical rank: rest +3.00 (copies +2.50)"


def test_change_that_profiled_steps_do_not_show_has_no_rank():
    """A sleeping rank computes no longer than its peers, so nothing in the breakdown distinguishes it."""
    found = split(500.0, launches(510.0, 3, USUAL | {"exposed_comm": 5.0}, rank=1), launches(10.0, 3, USUAL))
    assert str(found) == "split of +500 ms: exposed communication +4, rest +496"


def test_step_time_that_passed_is_not_split():
    assert check(launches(10.0, 3, CHANGED), launches(10.0, 10, USUAL)).notes == ()


def test_slower_tail_is_not_split():
    slow = [
        one.replace(num_steps=200, step_time_ms=one.step_time_ms | {"p99": 30.0}) for one in launches(10.0, 3, CHANGED)
    ]
    usual = [one.replace(num_steps=200) for one in launches(10.0, 10, USUAL)]
    verdicts = check(slow, usual)
    assert (verdicts["step_time_p99"].outcome, verdicts.notes) == (Outcome.REGRESSION, ())


def test_baseline_from_before_the_breakdown_says_why_there_is_no_split():
    document = make_baseline(launches=stored(*launches(10.0, 10, USUAL))).to_json()
    for entry in document["launches"]:
        del entry["breakdown_ms"], entry["critical_rank"]
    older = Baseline.from_json(document).center_launches
    (note,) = check(launches(20.0, 3, CHANGED), older).notes
    assert note == (
        "step_time_p50: the change can't be split, since the baseline has no breakdown of a step; record it again "
        f"with {RESET}"
    )
    (note,) = PairedComparison("case", {}, default_priors, None, 3).judge(launches(20.0, 3, CHANGED), older[:3]).notes
    assert note.endswith("since the reference has no breakdown of a step")


def test_launches_that_profiled_no_step_say_why_there_is_no_split():
    (note,) = check(launches(20.0, 3, None), launches(10.0, 10, USUAL)).notes
    assert note == "step_time_p50: the change can't be split, since the launches under test profiled no step"


def test_nothing_is_said_of_a_split_where_nothing_is_profiled():
    assert check(launches(20.0, 3, None), launches(10.0, 10, None)).notes == ()


def test_baseline_keeps_the_breakdown():
    baseline = make_baseline(launches=stored(*launches(10.0, 3, USUAL, rank=0)))
    assert Baseline.from_json(baseline.to_json()) == baseline


@given(st.floats(-1e6, 1e6), st.dictionaries(st.sampled_from(Part), st.floats(-1e4, 1e4), min_size=len(Part)))
def test_written_parts_add_up_to_the_written_change(total_ms, parts):
    found = Split(total_ms, parts, 3)
    named = sum(ms for part, ms in parts.items() if part is not Part.COPY)
    assert found.rest_ms + named == pytest.approx(total_ms, abs=1e-6)
    total, *shown = (float(number) for number in re.findall(r"[+-][\d.]+", re.sub(r"\(copies.*\)", "", str(found))))
    assert sum(shown) == pytest.approx(total, abs=1e-6)


@given(st.lists(st.floats(0, 100), min_size=3, max_size=3), st.lists(st.floats(0, 100), min_size=1, max_size=4))
def test_part_changes_by_no_more_than_the_launches_do(here, there):
    facts = [[make_facts(breakdown_ms={"compute": value}) for value in side] for side in (here, there)]
    found = split(1.0, *facts)
    low, high = sorted(here)[0] - max(there), sorted(here)[-1] - min(there)
    assert low - 1e-9 <= found.parts_ms[Part.COMPUTE] <= high + 1e-9
    assert found.rank is None
