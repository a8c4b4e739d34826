"""A regression of step time, split into parts that add up to it."""

from __future__ import annotations

from pytest_aorta.verdict.causes import split
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import default_priors, launches_near, make_baseline, stored

USUAL = {"compute": 8.0, "straggler": 0.0, "exposed_comm": 1.0, "copy": 0.5, "idle": 0.5}
CHANGED = {"compute": 10.0, "straggler": 8.1, "exposed_comm": 2.9, "copy": 0.5, "idle": 0.8}
RESET = "--update-baselines --aorta-record=replace"


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
    older = [one.replace(breakdown_ms={}, critical_rank=None) for one in launches(10.0, 10, USUAL)]
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
