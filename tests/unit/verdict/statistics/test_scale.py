"""Scales on which values are compared."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.statistics.decision import Scale

scales = st.sampled_from(Scale)
sizes = st.floats(1e-3, 1e3)


@given(scales, sizes, sizes)
def test_value_and_place_are_inverse(scale, value, step_ms):
    assert scale.from_transformed(scale.transform(value, step_ms), step_ms) == pytest.approx(value)


@given(scales, st.floats(-0.9, 10))
def test_change_and_difference_are_inverse(scale, change):
    assert scale.change(scale.difference(change)) == pytest.approx(change)


@given(scales, sizes, sizes, sizes)
def test_changed_value_is_a_difference_away(scale, value, change, step_ms):
    added = {Scale.RELATIVE: value * change, Scale.POINTS: change, Scale.OF_STEP: change * step_ms}[scale]
    apart = scale.transform(value + added, step_ms) - scale.transform(value, step_ms)
    assert apart == pytest.approx(scale.difference(change), rel=1e-6, abs=1e-9)


@given(scales, st.integers(1, 100))
def test_tolerance_is_read_as_it_is_written(scale, hundredths):
    assert scale.parse(scale.text(hundredths / 100)) == pytest.approx(hundredths / 100)


@pytest.mark.parametrize("scale", [Scale.POINTS, Scale.OF_STEP])
def test_nothing_is_a_value_where_there_is_no_factor(scale):
    assert scale.transform(0.0, 10.0) == 0.0
    assert Scale.RELATIVE.transform(0.0, 10.0) is None
    assert scale.transform(None, 10.0) is None
    assert scale.transform("abc", 10.0) is None


@pytest.mark.parametrize(
    ("metric", "given", "expected"),
    [
        ("overlap_ratio", "5 points", Tolerance(0.05, Scale.POINTS)),
        ("overlap_ratio", "0.5points", Tolerance(0.005, Scale.POINTS)),
        ("exposed_comm_ms", "2% of step", Tolerance(0.02, Scale.OF_STEP)),
        ("exposed_comm_ms", "exact", Tolerance(None)),
    ],
)
def test_tolerance_of_a_scale_is_read(metric, given, expected):
    found = METRICS[metric].parse_tolerance(given)
    assert (found.value, found.scale) == (pytest.approx(expected.value), expected.scale)


@pytest.mark.parametrize(
    ("metric", "given", "allowed"),
    [
        ("overlap_ratio", "5%", "a number above 0 and up to 100 points, such as '5 points', or 'exact'"),
        ("overlap_ratio", "101 points", "a number above 0 and up to 100 points, such as '5 points', or 'exact'"),
        ("exposed_comm_ms", "2%", "a number above 0 and up to 1000% of step, such as '5% of step', or 'exact'"),
        ("step_time_p50", "5 points", "a percentage above 0% up to 1000%, or 'exact'"),
    ],
)
def test_tolerance_of_another_scale_is_refused(metric, given, allowed):
    with pytest.raises(SpecError) as caught:
        METRICS[metric].parse_tolerance(given)
    assert str(caught.value) == f"tolerance of {metric}: got {given!r}, allowed is {allowed}"


def test_exposed_time_is_a_part_of_the_baselines_step():
    assert Scale.OF_STEP.transform(4.0, 20.0) == 0.2
    assert math.isclose(Scale.OF_STEP.from_transformed(0.2, 20.0), 4.0)
