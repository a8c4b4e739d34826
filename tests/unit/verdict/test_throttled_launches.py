"""Throttled devices of a launch appear in its verdicts, its notes, and when a baseline is recorded."""

from __future__ import annotations

import pytest

from pytest_aorta.common.model import to_builtins
from pytest_aorta.plan.world import World
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import PlatformFacts, Reading, Sample, summarize
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result, read_result
from pytest_aorta.verdict.causes import notes
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.learning import left_out
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import (
    default_priors,
    gpus,
    launches_near,
    make_baseline,
    make_facts,
    make_plan,
    make_result,
    rank_values,
    stored,
    write_ranks,
)

HOT = "GPU 1 throttled (hw_thermal_slowdown in 40% of samples, SM clock 1,200 of 1,980 MHz)"
STEADY = launches_near(10.0, 10)


def hot_facts() -> PlatformFacts:
    hot = Reading(1200, 3201, 400, 88, ("hw_thermal_slowdown",))
    samples = [Sample((Reading(1900), reading), True) for reading in [hot] * 2 + [Reading(1200)] * 3]
    return PlatformFacts("NVML", None, summarize(["0", "1"], [1980.0] * 2, samples))


def judged(*launches: LaunchFacts):
    baseline = make_baseline(launches=stored(*STEADY))
    return StoredComparison("case", baseline.config, baseline, {}, default_priors, 5).judge(launches)


def test_result_keeps_what_devices_did_and_reads_it_again(tmp_path):
    write_ranks(tmp_path, rank_values(), rank_values())
    plan = make_plan(tmp_path, world=World(2, "cuda", tuple(gpus(2))))
    result = collect_result(plan, LaunchOutcome("exit", 0, (), (), 1.0), hot_facts())
    assert result.platform_facts == hot_facts()
    assert read_result(tmp_path / "result.json") == result


def test_facts_of_a_launch_name_the_throttled_device_and_the_lowest_clock():
    facts = launch_facts(make_result([[1.0], [1.0]], platform_facts=hot_facts()))
    assert (facts.throttled, facts.sm_clock_mhz) == (HOT, 1200.0)


def test_launch_that_nothing_is_known_of_is_stored_as_before():
    assert to_builtins(launch_facts(make_result([[1.0], [1.0]]))).keys().isdisjoint({"throttled", "sm_clock_mhz"})


def test_first_slow_launch_that_was_throttled_says_so_and_asks_for_another_one():
    row = judged(launches_near(12, 1)[0].replace(throttled=HOT))["step_time_p50"]
    assert (row.outcome, row.is_open, row.reason) == (Outcome.INCONCLUSIVE, True, "GPUs throttled in the launch")


def test_pass_of_a_throttled_launch_needs_no_reason_and_has_the_note():
    verdicts = judged(STEADY[0].replace(throttled=HOT))
    assert (verdicts["step_time_p50"].outcome, verdicts["step_time_p50"].reason) == (Outcome.PASS, "")
    assert list(verdicts.notes) == [f"launch 1: {HOT}"]


def test_memory_that_grew_is_not_put_down_to_throttling():
    memory = make_facts(metrics={"peak_memory_bytes": 1e9})
    baseline = make_baseline(launches=stored(*[memory] * 10))
    launches = [memory.replace(metrics={"peak_memory_bytes": 2e9}, throttled=HOT)] * 3
    verdicts = StoredComparison("case", baseline.config, baseline, {}, default_priors, 5).judge(launches)
    assert (verdicts["peak_memory_bytes"].outcome, verdicts["peak_memory_bytes"].reason) == (Outcome.REGRESSION, "")


def test_throttled_reference_is_noted_since_it_can_hide_a_regression():
    candidates, references = launches_near(12, 3), launches_near(12, 3, throttled=HOT)
    verdicts = PairedComparison("case", {}, default_priors, max_pairs=3).judge(candidates, references)
    assert f"3 of the reference's 3 launches: {HOT}" in verdicts.notes


@pytest.mark.parametrize(("clock", "is_noted"), [(1700.0, False), (1600.0, True)])
def test_clock_well_below_the_baselines_is_noted(clock, is_noted):
    here, there = [make_facts(sm_clock_mhz=clock)] * 3, [make_facts(sm_clock_mhz=1755.0)] * 3
    expected = ["the SM clock was 9% lower than in the baseline: 1,600 against 1,755 MHz"] if is_noted else []
    assert notes(here, there, "baseline") == expected
    assert notes(here, [make_facts()], "baseline") == []


def test_throttling_is_no_objection_where_no_times_are_compared():
    cpu = {"torch": "2.11.0", "device": "cpu"}
    assert left_out([make_facts(throttled=HOT, environment=cpu)], {}) == {}
