"""Notes on a comparison: the straggler, the split of a step, and throttled devices."""

import pytest

from pytest_aorta.plan.accelerators import Reading
from pytest_aorta.plan.world import World
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result, read_result
from pytest_aorta.result.sensors import PlatformFacts, Sample, summarize
from pytest_aorta.verdict.causes import Straggler, notes, split, straggler
from pytest_aorta.verdict.verdicts import Open, Verdicts
from tests.unit.builders import (
    PASS,
    REGRESSION,
    baseline_of,
    changed,
    each_of,
    gpus,
    launches_near,
    make_facts,
    make_plan,
    make_result,
    on_cpu,
    rank_values,
    with_p50,
    write_ranks,
)
from tests.unit.verdict.compared import check, compare, left_out, texts


def lagging(*lags_ms: float, build=make_facts):
    """Return three launches with 10 ms steps."""
    return [build(rank_lag_ms=list(lags_ms))] * 3


def idle(idle_ms: float, *lags_ms: float, extra_ms: float = 0.0):
    """Return three launches with 10 ms steps, in which no stream is busy for ``idle_ms``."""
    breakdown = {"compute": 5.0, "straggler": extra_ms}
    changes = {"metrics": {"device_idle_ms": idle_ms}, "breakdown_ms": breakdown, "rank_lag_ms": list(lags_ms)}
    return [make_facts(**changes)] * 3


USUALLY_BUSY = idle(0.3, 0.0, 0.0)


def turns(*lags_ms: float):
    """Return a launch for each lag of the first rank, by which the second is ahead."""
    return [make_facts(rank_lag_ms=[lag, -lag]) for lag in lags_ms]


def slower(p50: float, launches):
    return [with_p50(launch, p50) for launch in launches]


LEVEL, ONE_LATE = lagging(0.0, 0.0), lagging(-5.0, 5.0)
TURNS = turns(20.0, -19.0, 21.0)


def late(rank: int, lag_ms: float, more_ms: float) -> Straggler:
    return Straggler(rank, lag_ms, pytest.approx(more_ms))


# Launches under test and the reference's -> the straggler.
STRAGGLERS = {
    "waits clearly less": (lagging(-0.5, -0.4, 0.9, -0.5), (), Straggler(2, 0.9)),
    "ranks that differ a little": (lagging(-0.1, 0.2), (), None),
    "lag of one launch of three": ([*lagging(0.1, -0.1)[:2], *lagging(9.0, -9.0)[:1]], (), None),
    # Two hosts sleep out of phase, and chance decides which one is ahead in a launch.
    "late in turns": (TURNS, (), None),
    "late in turns, against a reference": (TURNS, LEVEL, None),
    "late in all but one of ten launches": ([*lagging(-20.0, 20.0) * 3, *turns(19.0)], (), Straggler(1, 20.0)),
    "more compute beside late hosts": (idle(4.3, -4.0, 4.0, extra_ms=4.0), USUALLY_BUSY, late(1, 4.0, 4.0)),
    "idle time within the reference's range": (
        idle(4.1, -4.0, 4.0),
        [*USUALLY_BUSY, *idle(4.2, 0.0, 0.0)],
        late(1, 4.0, 4.0),
    ),
    "idle time without a reference": (idle(21.0, -20.0, 20.0), (), Straggler(1, 20.0)),
    "idle time that the reference lacks": (idle(21.0, -20.0, 20.0), LEVEL, late(1, 20.0, 20.0)),
    "as slow at the baseline": (lagging(-0.5, 0.9), lagging(-0.5, 0.8), None),
    "beyond its lag at the baseline": (lagging(-0.5, 0.9), lagging(0.0, 0.5), late(1, 0.9, 0.4)),
    "peers that became as slow": (LEVEL, ONE_LATE, None),
    "peers that became as slow as in one launch": (lagging(-0.1, 0.1), ONE_LATE[:1], None),
    "waits longer than its peers still": (lagging(-2.0, 2.0), ONE_LATE, None),
    "waits longer than its peers in one launch": (lagging(-2.0, 2.0), ONE_LATE[:1], None),
    "another rank caught up by more": (lagging(-1.0, -0.5, 1.5), lagging(-9.0, 5.0, 0.5), late(2, 1.5, 1.0)),
    "within the baseline's noise": (lagging(-0.4, 0.4), turns(0.0, -0.6, 0.6, -0.3, 0.3), None),
    "beyond a baseline without noise": (lagging(-0.4, 0.4), LEVEL * 2, late(1, 0.4, 0.4)),
    "less than half of what steps got longer": (slower(11.0, lagging(-0.4, 0.4)), LEVEL, None),
    "more than half of what steps got longer": (slower(11.0, lagging(-0.6, 0.6)), LEVEL, late(1, 0.6, 0.6)),
    "baseline of another number of ranks": (lagging(-0.5, 0.9), lagging(0.0, 0.9, 0.0), Straggler(1, 0.9)),
    "CPU ranks that share cores": (lagging(-1.0, 2.0, build=on_cpu), (), None),
    "slow CPU rank": (lagging(-1.0, 4.0, build=on_cpu), (), Straggler(1, 4.0)),
}


@each_of("here, there, expected", STRAGGLERS)
def test_straggler_is_the_rank_that_the_others_wait_for_more_than_in_the_reference(here, there, expected):
    assert straggler(here, there) == expected


@pytest.mark.parametrize("side", ["baseline", "reference"])
def test_rank_that_arrives_last_while_all_hosts_are_late_is_not_the_straggler(side):
    """On 2 H200s, both hosts slept for 36 ms in each step, and one rank waited 20 ms for the other."""
    note = straggler(idle(21.0, -20.0, 20.0), USUALLY_BUSY).note(side)
    assert "no straggler: the hosts are late" in note
    assert f"20.7 ms/step longer than in the {side}; rank 1 arrives last" in note
    # Of two hosts, one is late: the other rank's device is in a collective meanwhile.
    found = straggler(idle(10.3, -20.0, 20.0), USUALLY_BUSY)
    assert f"rank 1 is late: others wait 20 ms/step longer for it than in the {side}" in found.note(side)


def test_slow_rank_is_noted_with_what_the_others_wait():
    assert "rank 1 is late: others wait 0.9 ms/step" in straggler(lagging(-0.5, 0.9)).note("baseline")


def clocked(mhz: float):
    return [make_facts(sm_clock_mhz=mhz)] * 3


# Launches under test and the reference's -> the notes.
NOTES = {
    "late in turns": (TURNS, LEVEL, []),
    "slower": ([make_facts(step_time_growth=0.041)], [], ["steps get slower within a launch by at least 4.1%"]),
    "faster": ([make_facts(step_time_growth=-0.2)], [], ["steps get faster within a launch by at least 20.0%"]),
    "growth in one of three": ([*[make_facts()] * 2, make_facts(step_time_growth=0.5)], [], []),
    "late steps": (
        [make_facts(), make_facts(late_steps="the host was late in 2 of 8 profiled steps")],
        [],
        ["launch 2: the host was late in 2 of 8 profiled steps"],
    ),
    "clock well below": (
        clocked(1600.0),
        clocked(1755.0),
        ["the SM clock was 9% lower than in the baseline: 1,600 against 1,755 MHz"],
    ),
    "clock a little below": (clocked(1700.0), clocked(1755.0), []),
    "clock, unknown before": (clocked(1600.0), [make_facts()], []),
}


@each_of("here, there, found", NOTES)
def test_what_changes_within_launches_or_slows_them_is_noted(here, there, found):
    assert [*notes(here, there, "baseline")] == found


USUAL = {"compute": 8.0, "straggler": 0.0, "exposed_comm": 1.0, "copy": 0.5, "idle": 0.5}
CHANGED = {"compute": 10.0, "straggler": 8.1, "exposed_comm": 2.9, "copy": 0.5, "idle": 0.8}


def launches(p50: float, count: int, parts: dict[str, float] | None, rank: int | None = 0, **changes):
    return launches_near(p50, count, deviation=0.0001, breakdown_ms=parts or {}, critical_rank=rank, **changes)


def compared(here, there) -> Verdicts:
    return check(*here, baseline=baseline_of(*there))


def test_regression_names_the_parts_and_the_critical_rank():
    verdicts = compared(launches(22.4, 3, CHANGED, rank=1), launches(10.0, 10, USUAL))
    assert verdicts["step_time_p50"].outcome is REGRESSION
    [note] = texts(verdicts)
    for part in ("+12.4 ms on rank 1", "compute +2.0", "extra compute +8.1", "communication +1.9", "rest +0.1"):
        assert part in note


def test_pairs_with_a_reference_are_split_too():
    (note,) = texts(compare(launches(22.4, 6, CHANGED, rank=None), launches(10.0, 6, USUAL, rank=None)))
    assert note.startswith("step_time_p50: split of +12.4 ms: compute +2.0, ")


def test_copies_are_named_within_the_rest():
    found = split(3.0, launches(13.0, 3, USUAL | {"copy": 3.0}), launches(10.0, 3, USUAL))
    assert found.endswith(" rest +3.00 (copies +2.50)")


def test_change_that_profiled_steps_do_not_show_has_no_rank():
    """A sleeping rank computes no longer than its peers, so nothing in the breakdown distinguishes it."""
    found = split(500.0, launches(510.0, 3, USUAL | {"exposed_comm": 5.0}, rank=1), launches(10.0, 3, USUAL))
    assert "rank" not in found
    assert found.endswith("communication +4, rest +496")


def test_slower_tail_is_not_split():
    slow, usual = (
        [one.replace(num_steps=200, step_time_ms=one.step_time_ms | {"p99": p99}) for one in facts]
        for facts, p99 in ((launches(10.0, 3, CHANGED), 30.0), (launches(10.0, 10, USUAL), 12.0))
    )
    verdicts = compared(slow, usual)
    assert (verdicts["step_time_p99"].outcome, texts(verdicts)) == (REGRESSION, [])


def test_regression_without_a_breakdown_of_both_sides_is_not_split():
    slow, older = launches(20.0, 3, CHANGED), launches(10.0, 10, None, rank=None)
    assert texts(compared(slow, older)) == texts(compared(launches(20.0, 3, None), launches(10.0, 10, USUAL))) == []


HOT = "GPU 1 throttled (hw_thermal_slowdown in 40% of samples, SM clock 1,200 of 1,980 MHz)"
STEADY = launches_near(10.0, 10)


def hot_facts() -> PlatformFacts:
    hot = Reading(1200, ("hw_thermal_slowdown",))
    samples = [Sample((Reading(1900), reading), True) for reading in [hot] * 2 + [Reading(1200)] * 3]
    return PlatformFacts("NVML", None, summarize(["0", "1"], [1980.0] * 2, samples))


def judged(*launches: LaunchFacts) -> Verdicts:
    return check(*launches, baseline=baseline_of(*STEADY), max_launches=5)


def test_result_keeps_what_devices_did_and_reads_it_again(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    plan = make_plan(tmp_path, world=World(2, "cuda", tuple(gpus(2))))
    result = collect_result(plan, LaunchOutcome("exit", 0, (), (), 1.0), hot_facts())
    assert result.platform_facts == hot_facts()
    assert read_result(tmp_path / "result.json") == result


def test_facts_of_a_launch_name_the_throttled_device_and_the_lowest_clock():
    facts = make_result([[1.0], [1.0]], platform_facts=hot_facts()).facts
    assert (facts.description.throttled, facts.sm_clock_mhz) == (HOT, 1200.0)


def test_first_slow_launch_that_was_throttled_says_so_and_asks_for_another_one():
    row = judged(changed(launches_near(12, 1)[0], throttled=HOT))["step_time_p50"]
    assert row.state == Open()
    assert "throttled" in row.reason


def test_pass_of_a_throttled_launch_needs_no_reason_and_has_the_note():
    verdicts = judged(changed(STEADY[0], throttled=HOT))
    assert (verdicts["step_time_p50"].outcome, verdicts["step_time_p50"].reason) == (PASS, "")
    assert texts(verdicts) == [f"launch 1: {HOT}"]


def test_memory_that_grew_is_not_put_down_to_throttling():
    memory = make_facts(metrics={"peak_memory_bytes": 1e9})
    launches = [changed(memory, metrics={"peak_memory_bytes": 2e9}, throttled=HOT)] * 3
    row = check(*launches, baseline=baseline_of(*[memory] * 10), max_launches=5)["peak_memory_bytes"]
    assert (row.outcome, row.reason) == (REGRESSION, "")


def test_throttled_reference_is_noted_since_it_can_hide_a_regression():
    verdicts = compare(launches_near(12, 3), launches_near(12, 3, throttled=HOT), max_pairs=3)
    assert f"3 of the reference's 3 launches: {HOT}" in texts(verdicts)


def test_throttling_is_no_objection_where_no_times_are_compared():
    cpu = {"torch": "2.11.0", "device": "cpu"}
    assert left_out([make_facts(throttled=HOT, environment=cpu)], {}) == {}
