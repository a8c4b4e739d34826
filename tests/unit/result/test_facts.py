from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.result.facts import SAMPLE_SIZE, LaunchFacts, launch_facts
from pytest_aorta.result.trace.profiled_steps import HeadStart, StepOverlap
from tests.unit.builders import make_provenance, make_result, replace

# Maxima over the ranks, step by step: 4, 2, 3, 5.
TWO_RANKS = [[1.0, 2.0, 3.0, 5.0], [4.0, 1.0, 2.0, 1.0]]


def test_statistics_are_of_the_maxima_over_ranks():
    facts = launch_facts(make_result(TWO_RANKS))
    # p99 lies between the third and the fourth of 2, 3, 4, 5: 4 + 0.97. The tail of few steps is the slowest step.
    assert facts.step_time_ms == {"mean": 3.5, "p50": 3.5, "p99": pytest.approx(4.97), "tail5": 5.0, "max": 5.0}
    assert (facts.num_steps, facts.step_time_sample_ms) == (4, [4.0, 2.0, 3.0, 5.0])
    assert (facts.final_loss, facts.rank_lag_ms) == (None, [])


def test_tail_is_the_mean_of_the_slowest_twentieth():
    facts = launch_facts(make_result([[float(step) for step in range(1, 41)]]))
    assert facts.step_time_ms["tail5"] == 39.5


@given(st.integers(1, 400))
def test_sample_is_at_most_twenty_steps_in_order(steps):
    sample = launch_facts(make_result([[float(step) for step in range(steps)]])).step_time_sample_ms
    assert 1 <= len(sample) <= SAMPLE_SIZE == 20
    assert sample == sorted(set(sample))
    assert sample[0] == 0.0


def test_memory_is_the_largest_over_ranks_and_other_metrics_their_mean_with_all_digits_of_counts():
    names = ("peak_memory_bytes", "tokens_per_s", "reduce_scatter_bytes_per_step")
    ranks = dict(zip(names, ([10.0, 30.0], [1234567.25, 1234567.0], [10_000_001.0, 10_000_000.0]), strict=True))
    means = dict(zip(names, (30.0, 1.23457e6, 10_000_000.5), strict=True))
    assert launch_facts(make_result(TWO_RANKS, rank_metrics=ranks)).metrics == means


@pytest.mark.parametrize("kept", [{"attention": "flex"}, {"activation_checkpointing": "full on all 2 blocks"}])
def test_only_what_numbers_depend_on_is_kept_of_the_environment(kept):
    environment = {"torch": "2.11.0", "num_threads": 2, "hostname": "not kept"} | kept
    facts = launch_facts(make_result(TWO_RANKS, device="cuda", environment=environment))
    assert facts.environment == {"torch": "2.11.0"} | kept


def test_durations_keep_six_digits():
    assert launch_facts(make_result([[1.23456789]])).step_time_ms["p50"] == 1.23457


def test_hashes_and_the_last_loss_are_kept_whole():
    facts = launch_facts(make_result(TWO_RANKS, weight_hashes={"4": "ab" * 8}, loss=[3.0, 0.123456789]))
    assert (facts.weight_hashes, facts.final_loss) == ({"4": "ab" * 8}, 0.123456789)


def test_ranks_lags_come_from_their_waits():
    facts = launch_facts(make_result(TWO_RANKS, collective_ms=[[5.0, 5.0], [1.0, 2.0]]))
    assert facts.rank_lag_ms == [-3.5, 3.5]


def test_growth_of_steps_and_of_the_worst_ranks_memory_is_kept():
    steps = [1.0 + step / 100 for step in range(100)]
    flat, growing = [100] * 10, [100 + number for number in range(10)]
    facts = launch_facts(make_result([steps, steps], memory_bytes=[flat, growing]))
    assert facts.step_time_growth == pytest.approx(0.6, abs=0.1)
    assert facts.memory_growth == pytest.approx(0.086, abs=0.01)


def test_canary_is_the_slowest_ranks_at_the_better_of_its_two_moments():
    result = make_result(
        TWO_RANKS,
        canary_before={"gemm_ms": [1.0, 9.0], "all_reduce_ms": [2.0, 2.0]},
        canary_after={"gemm_ms": [1.0, 3.0], "all_reduce_ms": [4.0, 1.0]},
    )
    assert launch_facts(result).canary_ms == {"gemm_ms": 3.0, "all_reduce_ms": 2.0}


def test_canary_before_the_steps_counts_where_the_process_group_is_gone_after_them():
    facts = launch_facts(make_result(TWO_RANKS, canary_before={"gemm_ms": [1.0, 2.0]}))
    assert facts.canary_ms == {"gemm_ms": 2.0}


def test_facts_survive_json():
    facts = launch_facts(make_result(TWO_RANKS))
    assert convert(to_builtins(facts), LaunchFacts, "facts") == facts


def test_facts_have_the_time_and_the_block_of_the_result_s_provenance():
    measured = make_provenance(measured_at="2026-03-04T05:06:07Z", block="ab" * 6)
    facts = launch_facts(make_result(TWO_RANKS, provenance=measured))
    assert (facts.recorded_at, facts.block) == ("2026-03-04T05:06:07Z", "ab" * 6)
    assert facts.moment_s == 1772600767


@pytest.mark.parametrize("version", [("c0ffee00" * 5, "main", False), ("c0ffee00" * 5, None, True), (None, None, None)])
def test_facts_and_their_json_have_the_version_of_the_code(version):
    commit, branch, dirty = version
    measured = make_provenance(commit=commit, branch=branch, dirty=dirty)
    facts = launch_facts(make_result(TWO_RANKS, provenance=measured))
    assert (facts.commit, facts.branch, facts.dirty) == version
    assert facts.version == ("" if commit is None else "c0ffee00c0ff and changes" if dirty else "c0ffee00c0ff")
    assert ("dirty" in to_builtins(facts)) is (dirty is not None)


def test_late_steps_are_a_fact():
    lead = HeadStart(40.0, 3, 1.0, succeeded=True, late_steps=2)
    step = StepOverlap(10.0, 6.0, 2.0, 0.0, 2.0, 2.0)
    found = launch_facts(make_result(TWO_RANKS, overlap=[[step] * 6] * 2, head_start=[lead] * 2))
    text = "the host was late in 2 of 8 profiled steps in spite of every head start; the other 6 count"
    assert found.late_steps == text
    none_late = launch_facts(make_result(TWO_RANKS, overlap=[[step] * 8] * 2, head_start=[replace(lead, late_steps=0)]))
    assert "late_steps" not in to_builtins(none_late)
