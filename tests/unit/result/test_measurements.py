from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.result.measurements import FailureDetail
from tests.unit.builders import make_result

LOCATED = FailureDetail(
    "all_gather", iteration=4, rank=1, layer=2, source_rank=0, index=7, count=3, total=16, expected=1.5, actual=0.0,
    cause="zeroed shard",
)  # fmt: skip


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        (
            LOCATED,
            "all_gather: iteration 4, layer 2, on rank 1, from source rank 0: 3 of 16 elements wrong, "
            "first at index 7: expected 1.5, got 0 (zeroed shard)",
        ),
        (FailureDetail("loss", iteration=0, rank=3), "loss: iteration 0, on rank 3: 1 elements wrong"),
        (FailureDetail("h2d", iteration=0, rank=0, index=5), "first at index 5"),
    ],
)
def test_failed_check_says_what_it_knows_of_where_how_many_and_what(detail, text):
    assert str(detail).endswith(text)


def test_ranks_of_unequal_lengths_have_no_step_times():
    with pytest.raises(ValueError, match="zip"):
        make_result([[1.0, 5.0], [2.0]]).step_times_ms  # noqa: B018


@pytest.mark.parametrize(("steps", "names"), [(99, {"step_time_p50"}), (100, {"step_time_p50", "step_time_p99"})])
def test_percentile_of_a_tail_needs_a_hundred_steps(steps, names):
    assert set(make_result([[float(step) for step in range(steps)]]).metrics) == names


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20), st.integers(100, 130))
def test_quantiles_of_a_result_are_those_that_verdicts_compare(values, steps):
    times = (values * steps)[:steps]
    metrics = make_result([times]).metrics
    assert metrics["step_time_p50"] == pytest.approx(np.quantile(times, 0.5))
    assert metrics["step_time_p99"] == pytest.approx(np.quantile(times, 0.99))


def test_metrics_over_ranks_are_the_largest_peak_and_the_mean_of_others_also_of_large_values():
    ranks = {"peak_x": [1.0, 3.0], "gemm_throughput_tflops": [1, 2], "x": [1.7e308, 1.7e308]}
    assert make_result([[1.0], [2.0]], rank_metrics=ranks).metrics == {
        "peak_x": 3.0, "gemm_throughput_tflops": 1.5, "gemm_throughput": 1.5, "x": 1.7e308, "step_time_p50": 2.0,
    }  # fmt: skip
