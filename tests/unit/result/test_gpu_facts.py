"""Facts of a launch from samples of its devices, and the rules of throttling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.result.measurements import (
    PlatformFacts,
    Reading,
    Sample,
    lowest_sm_clock_mhz,
    summarize,
    throttled,
)
from tests.unit.builders import replace

H200_CLOCK_MHZ = 1980.0
BUSY = Reading(1755, 3201, 690, 61)


def facts_of(
    *samples: Sample, highest: float | None = H200_CLOCK_MHZ, names: tuple[str, ...] = ("0",)
) -> PlatformFacts:
    return PlatformFacts("NVML", None, summarize(names, [highest] * len(names), samples))


def in_steps(*reasons: str, clock: float = 1755) -> Sample:
    return Sample((replace(BUSY, throttle_reasons=reasons, sm_clock_mhz=clock),), in_steps=True)


def test_numbers_are_those_of_the_measured_steps():
    idle = Sample((Reading(345, 3201, 75, 30),), in_steps=False)
    [device] = facts_of(idle, in_steps(clock=1700), in_steps(clock=1800), in_steps(clock=1980), idle).devices
    assert (device.num_samples, device.in_steps) == (3, True)
    assert device.sm_clock_mhz == {"min": 1700, "median": 1800, "max": 1980}
    assert device.power_w == {"min": 690, "median": 690, "max": 690}
    assert (device.before.power_w, device.after.temperature_c) == (75, 30)


def test_launch_without_a_sample_in_its_steps_is_summarized_by_all_samples():
    samples = [Sample((Reading(clock, throttle_reasons=("gpu_idle",)),), in_steps=False) for clock in (345, 600)]
    facts = facts_of(*samples)
    [device] = facts.devices
    assert (device.num_samples, device.in_steps, device.throttle_reasons) == (2, False, {"gpu_idle": 1.0})
    assert lowest_sm_clock_mhz(facts) is None


@pytest.mark.parametrize(
    "reason", ["hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "prochot"]
)
def test_protective_reason_is_throttling_unless_hardly_any_sample_has_it(reason):
    facts = facts_of(in_steps(reason, clock=1200), in_steps(clock=1980), in_steps(reason, clock=1200))
    assert throttled(facts) == [f"GPU 0 throttled ({reason} in 67% of samples, SM clock 1,200 of 1,980 MHz)"]
    assert throttled(facts_of(in_steps(reason), *[in_steps()] * 29)) == []


@pytest.mark.parametrize("reason", ["gpu_idle", "applications_clocks_setting", "sync_boost"])
def test_informative_reason_is_no_throttling(reason):
    assert throttled(facts_of(in_steps(reason))) == []


@pytest.mark.parametrize(
    ("clock", "highest", "is_throttled"),
    [
        (1500, H200_CLOCK_MHZ, False),
        (1100, H200_CLOCK_MHZ, True),
        (1500, None, False),
    ],
)
def test_power_cap_is_throttling_only_at_low_clocks(clock, highest, is_throttled):
    assert bool(throttled(facts_of(in_steps("sw_power_cap", clock=clock), highest=highest))) == is_throttled


def test_the_throttled_one_of_two_devices_is_named():
    hot = replace(BUSY, throttle_reasons=("hw_thermal_slowdown",), sm_clock_mhz=1200)
    facts = facts_of(Sample((BUSY, hot), in_steps=True), names=("2", "3"))
    assert [line.split(" throttled")[0] for line in throttled(facts)] == ["GPU 3"]
    assert lowest_sm_clock_mhz(facts) == 1200


def test_nothing_is_known_without_devices():
    for facts in (None, PlatformFacts("NVML", "NVML: Driver Not Loaded")):
        assert (throttled(facts), lowest_sm_clock_mhz(facts)) == ([], None)


NUMBERS = st.none() | st.floats(0, 1e6)
READINGS = st.builds(
    Reading, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.lists(st.sampled_from("ab"), unique=True).map(tuple)
)


@given(st.lists(st.builds(Sample, st.tuples(READINGS, READINGS), st.booleans()), min_size=1))
def test_any_samples_make_facts_that_survive_a_file(samples):
    facts = facts_of(*samples, names=("0", "1"))
    assert convert(to_builtins(facts), PlatformFacts, "facts") == facts
    for device in facts.devices:
        assert all(0 < fraction <= 1 for fraction in device.throttle_reasons.values())
        for span in (device.sm_clock_mhz, device.power_w):
            assert not span or span["min"] <= span["median"] <= span["max"]
