"""Notes on a comparison: the straggler, and the split of a step."""

from __future__ import annotations

import pytest

from pytest_aorta.verdict.causes import Straggler, notes, notes_on, split, straggler
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import (
    default_priors,
    launches_near,
    make_baseline,
    make_facts,
    make_verdict,
    on_cpu,
    stored,
    with_p50,
)


def lagging(*lags_ms: float, build=make_facts):
    """Return three launches with 10 ms steps."""
    return [build(rank_lag_ms=list(lags_ms))] * 3


def test_rank_that_waits_clearly_less_is_the_straggler():
    assert straggler(lagging(-0.5, -0.4, 0.9, -0.5)) == Straggler(2, 0.9)


def test_ranks_that_differ_a_little_are_none():
    assert straggler(lagging(-0.1, 0.2)) is None


def test_lag_of_one_launch_out_of_three_is_none():
    assert straggler([*lagging(0.1, -0.1)[:2], *lagging(9.0, -9.0)[:1]]) is None


def test_ranks_that_are_late_in_turns_from_launch_to_launch_are_none():
    """Two hosts sleep out of phase, and chance decides which one is ahead in a launch."""
    turns = [make_facts(rank_lag_ms=[lag, -lag]) for lag in (20.0, -19.0, 21.0)]
    assert straggler(turns) is None
    assert straggler(turns, lagging(0.0, 0.0)) is None


def test_rank_that_is_late_in_all_but_one_of_ten_launches_is_the_straggler():
    launches = [*lagging(-20.0, 20.0) * 3, make_facts(rank_lag_ms=[19.0, -19.0])]
    assert straggler(launches) == Straggler(1, 20.0)


def idle(idle_ms: float, *lags_ms: float, extra_ms: float = 0.0):
    """Return three launches with 10 ms steps, in which no stream is busy for ``idle_ms``."""
    breakdown = {"compute": 5.0, "straggler": extra_ms}
    changes = {"metrics": {"device_idle_ms": idle_ms}, "breakdown_ms": breakdown, "rank_lag_ms": list(lags_ms)}
    return [make_facts(**changes)] * 3


@pytest.mark.parametrize("side", ["baseline", "reference"])
def test_rank_that_arrives_last_while_all_hosts_are_late_is_not_the_straggler(side):
    """On 2 H200s, both hosts slept for 36 ms in each step, and one rank waited 20 ms for the other."""
    usual = idle(0.3, 0.0, 0.0)
    assert straggler(idle(21.0, -20.0, 20.0), usual).note(side) == (
        f"no straggler: the hosts are late, since no stream is busy for 20.7 ms/step longer than in the {side}; rank 1 "
        "arrives last, its peers wait 20 ms/step longer"
    )
    # Of two hosts, one is late: the other rank's device is in a collective meanwhile.
    found = straggler(idle(10.3, -20.0, 20.0), usual)
    assert found.note(side) == f"others wait 20 ms/step longer for rank 1 than in the {side}"


def test_late_hosts_do_not_hide_a_rank_with_more_compute():
    found = straggler(idle(4.3, -4.0, 4.0, extra_ms=4.0), idle(0.3, 0.0, 0.0))
    assert found == Straggler(1, 4.0, pytest.approx(4.0))


def test_idle_time_within_the_range_of_the_reference_does_not_explain_a_lag():
    usual = [*idle(0.3, 0.0, 0.0), *idle(4.2, 0.0, 0.0)]
    assert straggler(idle(4.1, -4.0, 4.0), usual) == Straggler(1, 4.0, pytest.approx(4.0))


def test_idle_time_without_a_reference_does_not_explain_a_lag():
    assert straggler(idle(21.0, -20.0, 20.0)) == Straggler(1, 20.0)
    assert straggler(idle(21.0, -20.0, 20.0), lagging(0.0, 0.0)) == Straggler(1, 20.0, pytest.approx(20.0))


def test_rank_that_was_as_slow_at_the_baseline_is_none():
    assert straggler(lagging(-0.5, 0.9), lagging(-0.5, 0.8)) is None


def test_lag_is_reported_beyond_that_of_the_baseline():
    assert straggler(lagging(-0.5, 0.9), lagging(0.0, 0.5)) == Straggler(1, 0.9, pytest.approx(0.4))


@pytest.mark.parametrize("launches", [1, 3])
def test_rank_whose_peers_became_as_slow_is_not_blamed(launches):
    assert straggler(lagging(0.0, 0.0), lagging(-5.0, 5.0)[:launches]) is None
    assert straggler(lagging(-0.1, 0.1), lagging(-5.0, 5.0)[:launches]) is None


@pytest.mark.parametrize("launches", [1, 3])
def test_rank_that_still_waits_longer_than_its_peers_is_not_blamed(launches):
    assert straggler(lagging(-2.0, 2.0), lagging(-5.0, 5.0)[:launches]) is None


def test_rank_that_the_others_wait_for_is_named_even_if_another_rank_caught_up_by_more():
    assert straggler(lagging(-1.0, -0.5, 1.5), lagging(-9.0, 5.0, 0.5)) == Straggler(2, 1.5, pytest.approx(1.0))


def test_lag_within_the_noise_of_the_baseline_names_no_straggler():
    scattered = [make_facts(rank_lag_ms=[-lag, lag]) for lag in (0.0, 0.6, -0.6, 0.3, -0.3)]
    assert straggler(lagging(-0.4, 0.4), scattered) is None
    assert straggler(lagging(-0.4, 0.4), lagging(0.0, 0.0) * 2) == Straggler(1, 0.4, pytest.approx(0.4))


def test_lag_of_less_than_half_of_what_steps_got_longer_names_nobody():
    slower = [with_p50(launch, 11.0) for launch in lagging(-0.4, 0.4)]
    assert straggler(slower, lagging(0.0, 0.0)) is None
    slower = [with_p50(launch, 11.0) for launch in lagging(-0.6, 0.6)]
    assert straggler(slower, lagging(0.0, 0.0)) == Straggler(1, 0.6, pytest.approx(0.6))


def test_baseline_of_another_number_of_ranks_tells_nothing_of_lags():
    assert straggler(lagging(-0.5, 0.9), lagging(0.0, 0.9, 0.0)) == Straggler(1, 0.9)


def test_launches_without_waits_have_no_slow_rank():
    assert straggler([make_facts()]) is None


def test_cpu_ranks_that_share_cores_may_differ_by_more():
    assert straggler(lagging(-1.0, 2.0, build=on_cpu)) is None
    assert straggler(lagging(-1.0, 4.0, build=on_cpu)) == Straggler(1, 4.0)


def test_nothing_odd_has_no_notes():
    assert notes([make_facts()] * 3, [make_facts()], "baseline") == []


def test_slow_rank_is_noted_with_what_the_others_wait():
    assert straggler(lagging(-0.5, 0.9)).note("baseline") == "others wait 0.9 ms/step for rank 1"


@pytest.mark.parametrize("side", ["baseline", "reference"])
def test_lag_beyond_that_of_the_other_side_is_noted_as_a_difference(side):
    found = straggler(lagging(-0.5, 0.9), lagging(0.0, 0.5))
    assert found.note(side) == f"others wait 0.4 ms/step longer for rank 1 than in the {side}"


@pytest.mark.parametrize(
    ("growth", "text"),
    [
        (0.041, "steps get slower within a launch by at least 4.1%"),
        (-0.2, "steps get faster within a launch by at least 20.0%"),
    ],
)
def test_steps_that_change_within_a_launch_are_noted(growth, text):
    assert notes([make_facts(step_time_growth=growth)], [], "baseline") == [text]


def test_growth_in_one_launch_out_of_three_is_not_noted():
    assert (
        notes([make_facts(), make_facts(), make_facts(step_time_growth=0.5, memory_growth=0.5)], [], "baseline") == []
    )


def test_memory_that_grows_is_noted_and_memory_that_shrinks_is_not():
    assert notes([make_facts(memory_growth=0.1)], [], "baseline") == [
        "memory grows within a launch by at least 10.0%; look for a leak"
    ]
    assert notes([make_facts(memory_growth=-0.1)], [], "baseline") == []


def canary_notes(launches, reference, side) -> list[str]:
    """Return the notes on the canary if a time is in question."""
    found, _ = notes_on([make_verdict(Outcome.INCONCLUSIVE)], launches, reference, side)
    return [note for note in found if "canary" in note]


@pytest.mark.parametrize(("name", "part"), [("gemm_ms", "GEMM"), ("all_reduce_ms", "all-reduce")])
@pytest.mark.parametrize("side", ["baseline", "reference"])
def test_slower_canary_suspects_the_machine(name, part, side):
    found = canary_notes([make_facts(canary_ms={name: 1.2})], [make_facts(canary_ms={name: 1.0})], side)
    assert found == [f"the canary's {part} was 20% slower than in the {side}; suspect the machine"]


def test_canary_within_the_range_of_the_reference_suspects_nothing():
    """Compare with ten launches of one hour on 2 H200s."""
    times_ms = (0.511, 0.513, 0.509, 0.51, 0.521, 0.52, 0.526, 0.512, 0.562, 0.55)
    usual = [make_facts(canary_ms={"all_reduce_ms": ms}) for ms in times_ms]

    def notes_of(*here_ms):
        return canary_notes([make_facts(canary_ms={"all_reduce_ms": ms}) for ms in here_ms], usual, "baseline")

    assert notes_of(0.53, 0.56, 0.58) == []
    assert notes_of(0.56, 0.57, 0.58) == [
        "the canary's all-reduce was 10% slower than in the baseline; suspect the machine"
    ]


@pytest.mark.parametrize("there", [{}, {"gemm_ms": 0.0}, {"gemm_ms": 1.19}])
def test_canary_that_has_nothing_slower_to_compare_with_is_no_note(there):
    assert canary_notes([make_facts(canary_ms={"gemm_ms": 1.2})], [make_facts(canary_ms=there)], "baseline") == []


def test_launch_with_late_steps_is_noted():
    late = make_facts(late_steps="the host was late in 2 of 8 profiled steps")
    assert notes([make_facts(), late], [], "baseline") == ["launch 2: the host was late in 2 of 8 profiled steps"]


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
