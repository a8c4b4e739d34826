import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.model import to_builtins
from pytest_aorta.plan.accelerators import Reading
from pytest_aorta.result.facts import (
    DEPENDENT_STEPS,
    growth,
    rank_lags_ms,
)
from pytest_aorta.result.provenance import version_text
from pytest_aorta.result.sensors import PlatformFacts, Sample, summarize
from tests.unit.builders import each_of, make_provenance, make_result, replace

# Maxima over the ranks, step by step: 4, 2, 3, 5.
TWO_RANKS = [[1.0, 2.0, 3.0, 5.0], [4.0, 1.0, 2.0, 1.0]]


def test_statistics_are_of_the_maxima_over_ranks():
    facts = make_result(TWO_RANKS).facts
    # p99 lies between the third and the fourth of 2, 3, 4, 5: 4 + 0.97. The tail of few steps is the slowest step.
    times = {"mean": 3.5, "p10": pytest.approx(2.3), "p50": 3.5, "p99": pytest.approx(4.97), "tail5": 5.0}
    assert facts.step_time_ms == times
    assert facts.num_steps == 4
    assert (facts.final_loss, facts.rank_lag_ms) == (None, [])


def test_tail_is_the_mean_of_the_slowest_twentieth():
    facts = make_result([[float(step) for step in range(1, 41)]]).facts
    assert facts.step_time_ms["tail5"] == 39.5


def test_memory_is_the_largest_over_ranks_and_other_metrics_are_means():
    names = ("peak_memory_bytes", "tokens_per_s", "reduce_scatter_bytes_per_step")
    ranks = dict(zip(names, ([10.0, 30.0], [1234567.25, 1234567.0], [10_000_001.0, 10_000_000.0]), strict=True))
    means = dict(zip(names, (30.0, 1.23457e6, 10_000_000.5), strict=True))
    assert make_result(TWO_RANKS, rank_metrics=ranks).facts.metrics == means


@pytest.mark.parametrize("kept", [{"attention": "flex"}, {"activation_checkpointing": "full on all 2 blocks"}])
def test_only_what_numbers_depend_on_is_kept_of_the_environment(kept):
    environment = {"torch": "2.11.0", "num_threads": 2, "hostname": "not kept"} | kept
    facts = make_result(TWO_RANKS, device="cuda", environment=environment).facts
    assert facts.environment == {"torch": "2.11.0"} | kept


def test_ranks_lags_come_from_their_waits():
    facts = make_result(TWO_RANKS, collective_ms=[[5.0, 5.0], [1.0, 2.0]]).facts
    assert facts.rank_lag_ms == [-3.5, 3.5]


def test_growth_of_steps_and_of_each_ranks_memory_is_kept():
    steps = [1.0 + step / 100 for step in range(100)]
    flat, growing = [100] * 10, [100 + number for number in range(10)]
    facts = make_result([steps, steps], memory_bytes=[flat, growing]).facts
    assert facts.description.step_time_growth == pytest.approx(0.6, abs=0.1)
    assert facts.growth_of("memory") == pytest.approx([0, 0.086], abs=0.01)
    assert (facts.memory_bytes, facts.memory_growth_bytes[1]) == ([100, 104], pytest.approx(9, abs=1))


@pytest.mark.parametrize("version", [("c0ffee00" * 5, "main", False), ("c0ffee00" * 5, None, True), (None, None, None)])
def test_facts_and_their_json_have_the_version_of_the_code(version):
    commit, branch, dirty = version
    measured = make_provenance(commit=commit, branch=branch, dirty=dirty)
    facts = make_result(TWO_RANKS, provenance=measured).facts
    text = "" if commit is None else "c0ffee00c0ff and changes" if dirty else "c0ffee00c0ff"
    assert version_text(measured.commit, measured.dirty) == text
    assert to_builtins(facts)["provenance"]["dirty"] is dirty


def autocorrelated(rng: random.Random, count: int, rho: float = 0.6, deviation: float = 0.02) -> list[float]:
    error, values = 0.0, []
    for _ in range(count):
        error = rho * error + rng.gauss(0, deviation)
        values.append(1 + error)
    return values


@each_of("waits", {"no ranks": [], "one rank": [[1.0, 2.0]], "no steps": [[], []]})
def test_ranks_without_others_or_without_waits_have_no_lags(waits):
    assert rank_lags_ms(waits) == []


@given(st.integers(2, 7), st.integers(1, 9), st.randoms(use_true_random=False))
def test_lags_are_those_of_the_definition(num_ranks, num_steps, rng):
    waits = [[rng.choice([0.0, 1.0, rng.random()]) for _ in range(num_steps)] for _ in range(num_ranks)]
    for rank, lag in enumerate(rank_lags_ms(waits)):
        others = [
            median(waits[other][step] for other in range(num_ranks) if other != rank) - waits[rank][step]
            for step in range(num_steps)
        ]
        fewer, more = sorted([sum(other > 0 for other in others), sum(other < 0 for other in others)])
        assert lag == pytest.approx(median(others) if more >= 2 * fewer else 0.0, abs=1e-12)


def test_ramp_is_found_at_little_less_than_its_size():
    rng = random.Random(1)
    values = [value + 0.2 * step / 200 for step, value in enumerate(autocorrelated(rng, 200))]
    assert 0.1 < growth(values, DEPENDENT_STEPS) < 0.2


def test_memory_that_leaks_is_found_from_seven_readings():
    assert growth([100.0 + reading for reading in range(7)]) == pytest.approx(6 / 103)


@pytest.mark.parametrize("values", [[], [1.0] * 6, list(range(1, 7)), [0.0, *range(1, 30)], [5.0] * 50])
def test_too_few_values_and_constant_ones_do_not_grow(values):
    assert growth(values) == 0


def test_too_few_dependent_steps_show_no_growth():
    assert growth([1 + step / 10 for step in range(34)], DEPENDENT_STEPS) == 0
    assert growth([1 + step / 10 for step in range(35)], DEPENDENT_STEPS) > 0


def test_one_stall_is_no_growth():
    assert growth([1.0] * 99 + [50.0], DEPENDENT_STEPS) == 0


@pytest.mark.parametrize("count", [20, 50, 100])
def test_autocorrelated_steps_rarely_look_like_growth(count):
    rng = random.Random(count)
    found = sum(growth(autocorrelated(rng, count), DEPENDENT_STEPS) != 0 for _ in range(400))
    # The stated rate is 1%, and up to 2% at 42 steps; at 2%, more than 16 of 400 have a chance of 1e-3.
    assert found <= 16


H200_CLOCK_MHZ = 1980.0
BUSY = Reading(1755)


def facts_of(
    *samples: Sample, highest: float | None = H200_CLOCK_MHZ, names: tuple[str, ...] = ("0",)
) -> PlatformFacts:
    return PlatformFacts("NVML", None, summarize(names, [highest] * len(names), samples))


def in_steps(*reasons: str, clock: float = 1755) -> Sample:
    return Sample((replace(BUSY, throttle_reasons=reasons, sm_clock_mhz=clock),), in_steps=True)


def test_numbers_are_those_of_the_measured_steps():
    idle = Sample((Reading(345),), in_steps=False)
    [device] = facts_of(idle, in_steps(clock=1700), in_steps(clock=1800), in_steps(clock=1980), idle).devices
    assert device.in_steps
    assert device.sm_clock_mhz == 1800


def test_launch_without_a_sample_in_its_steps_is_summarized_by_all_samples():
    samples = [Sample((Reading(clock, throttle_reasons=("gpu_idle",)),), in_steps=False) for clock in (345, 600)]
    facts = facts_of(*samples)
    [device] = facts.devices
    assert (device.in_steps, device.throttle_reasons) == (False, {"gpu_idle": 1.0})
    assert facts.lowest_sm_clock_mhz is None


@pytest.mark.parametrize(
    "reason", ["hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"]
)
def test_protective_reason_is_throttling_unless_hardly_any_sample_has_it(reason):
    facts = facts_of(in_steps(reason, clock=1200), in_steps(clock=1980), in_steps(reason, clock=1200))
    [line] = facts.throttled
    assert f"{reason} in 67% of samples, SM clock 1,200 of 1,980 MHz" in line
    assert facts_of(in_steps(reason), *[in_steps()] * 29).throttled == []


@pytest.mark.parametrize("reason", ["gpu_idle", "applications_clocks_setting", "sync_boost"])
def test_informative_reason_is_no_throttling(reason):
    assert facts_of(in_steps(reason)).throttled == []


@pytest.mark.parametrize(
    ("clock", "highest", "is_throttled"),
    [(1500, H200_CLOCK_MHZ, False), (1100, H200_CLOCK_MHZ, True), (1500, None, False)],
)
def test_power_cap_is_throttling_only_at_low_clocks(clock, highest, is_throttled):
    assert bool(facts_of(in_steps("sw_power_cap", clock=clock), highest=highest).throttled) == is_throttled


def test_the_throttled_one_of_two_devices_is_named():
    hot = replace(BUSY, throttle_reasons=("hw_thermal_slowdown",), sm_clock_mhz=1200)
    facts = facts_of(Sample((BUSY, hot), in_steps=True), names=("2", "3"))
    assert [line.split(" throttled")[0] for line in facts.throttled] == ["GPU 3"]
    assert facts.lowest_sm_clock_mhz == 1200


def test_nothing_is_known_without_devices():
    facts = PlatformFacts("NVML", "NVML: Driver Not Loaded")
    assert (facts.throttled, facts.lowest_sm_clock_mhz) == ([], None)
