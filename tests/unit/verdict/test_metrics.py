from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.verdict.metrics import METRICS, Tolerance, format_value
from tests.unit.builders import make_facts


@pytest.mark.parametrize(
    ("text", "relative"), [("5%", 0.05), ("0.5%", 0.005), ("1000%", 10.0), ("2 %", 0.02), ("007%", 0.07)]
)
def test_percentage_is_read_as_fraction(text, relative):
    assert METRICS["step_time_p50"].parse_tolerance(text).value == pytest.approx(relative)


def test_exact_is_a_tolerance_of_numbers_too():
    assert METRICS["final_loss"].parse_tolerance("exact") == Tolerance(None)


def test_hash_takes_exact_only():
    with pytest.raises(SpecError) as caught:
        METRICS["weight_hash"].parse_tolerance("5%")
    assert str(caught.value) == "tolerance of weight_hash: got '5%', allowed is 'exact'"


@given(st.integers(1, 1000))
def test_tolerance_prints_as_a_user_writes_it(percent):
    metric = METRICS["step_time_p50"]
    assert metric.parse_tolerance(str(metric.parse_tolerance(f"{percent}%"))).value == pytest.approx(percent / 100)


def test_exact_prints_as_a_user_writes_it():
    assert str(Tolerance(None)) == "exact"
    assert str(Tolerance(0.025)) == "2.5%"


def test_weight_hash_is_the_one_after_the_last_step_by_number():
    assert METRICS["weight_hash"].measure(make_facts()) == "0" * 16


def test_metric_that_the_launch_lacks_measures_none():
    bare = make_facts(weight_hashes={}, final_loss=None, metrics={}, num_steps=100)
    absent = {name for name, metric in METRICS.items() if metric.measure(bare) is None}
    assert {"weight_hash", "final_loss", "peak_memory_bytes", "tokens_per_s"} <= absent
    assert not any(name.startswith("step_time") for name in absent)


def test_final_loss_is_that_of_the_facts():
    assert METRICS["final_loss"].measure(make_facts(final_loss=2.0)) == 2.0


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_row_is_named_and_of_a_known_kind_and_direction(metric):
    assert METRICS[metric.name] is metric
    assert metric.kind in {"timing", "memory", "numeric", "count"}
    assert metric.direction in {"lower", "higher", "exact"}
    assert metric.help


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ms", "-"),
        (12.3456, "ms", "12.35 ms"),
        (0, "ms", "0 ms"),
        (1e-7, "", "1.000e-07"),
        (123456.0, "1/s", "1.235e+05 1/s"),
        (3 << 20, "B", "3 MiB"),
        ("0123456789abcdef", "", "0123456789ab"),
    ],
)
def test_value_is_short_enough_for_a_table(value, unit, text):
    assert format_value(value, unit) == text


def test_exact_values_are_shown_with_every_digit_that_can_differ():
    assert format_value(1048576.0, "B", exact=True) == "1,048,576 B"
    assert format_value(5.5470147132873535, "", exact=True) == "5.5470147132873535"
    assert format_value(1048576.0, "B") == "1 MiB"
