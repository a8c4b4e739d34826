"""Verdicts by a stored baseline."""

from __future__ import annotations

import pytest

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdict
from tests.unit.builders import (
    default_priors,
    launches_near,
    make_baseline,
    make_facts,
    on_cpu,
    stamp,
    stored,
    with_p50,
)
from tests.unit.verdict.compared import CONFIG, STABLE, check, outcomes


def test_same_facts_pass_every_default_metric_they_have():
    launches = [make_facts(metrics={"peak_memory_bytes": 1.0})] * 3
    verdicts = check(*launches, baseline=make_baseline(launches=stored(*launches * 3)))
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "peak_memory_bytes", "weight_hash"], Outcome.PASS)


def test_slower_median_is_a_regression_of_that_metric_alone():
    verdicts = check(*[with_p50(make_facts(), 12.0)] * 3, baseline=STABLE)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}
    row = verdicts["step_time_p50"]
    assert (row.value, row.baseline, row.delta, row.launches) == (
        12.0,
        pytest.approx(10, 1e-3),
        pytest.approx(0.2, 0.01),
        3,
    )
    assert row.low < row.delta < row.high


def test_one_slow_launch_asks_for_another_one():
    verdicts = check(with_p50(make_facts(), 20.0), baseline=STABLE, max_launches=3)
    assert (verdicts["step_time_p50"].outcome, verdicts.need_launches) == (Outcome.INCONCLUSIVE, True)


def test_verdict_that_is_there_is_not_made_anew_from_more_launches():
    comparison = StoredComparison("case", CONFIG, STABLE, {}, default_priors, 3)
    first = comparison.judge([make_facts()])
    later = comparison.judge([with_p50(make_facts(), 99.0)] * 3, first.decided)
    assert later["step_time_p50"] is first["step_time_p50"]


def test_marked_tolerance_replaces_the_default():
    slower = [with_p50(make_facts(), 12.0)] * 3
    verdicts = check(*slower, baseline=STABLE, marked={"step_time_p50": Tolerance(0.3)})
    assert verdicts["step_time_p50"].outcome is Outcome.PASS


def test_marked_metric_is_compared_that_is_not_by_default():
    row = check(make_facts(), baseline=STABLE, marked={"step_time_mean": Tolerance(0.2)})["step_time_mean"]
    assert (row.outcome, str(row.tolerance)) == (Outcome.PASS, "20%")


def test_metric_where_more_is_better_regresses_downwards():
    baseline = make_baseline(launches=stored(*[make_facts(metrics={"tokens_per_s": 100.0})] * 10))
    marked = {"tokens_per_s": Tolerance(0.05)}
    for value, outcome in ((60.0, Outcome.REGRESSION), (160.0, Outcome.IMPROVED)):
        row = check(*[make_facts(metrics={"tokens_per_s": value})] * 3, baseline=baseline, marked=marked)[
            "tokens_per_s"
        ]
        assert (row.outcome, row.delta) == (outcome, pytest.approx(value / 100 - 1))
        assert row.low < row.delta < row.high


def test_improvement_says_that_the_baseline_is_stale():
    row = check(*[with_p50(make_facts(), 5.0)] * 3, baseline=STABLE)["step_time_p50"]
    assert row.outcome is Outcome.IMPROVED
    assert row.reason == "the baseline is stale; record the better value with --update-baselines --aorta-record=replace"


def test_absent_baseline_is_missing_and_says_how_to_record_it():
    verdicts = check(make_facts())
    assert set(outcomes(verdicts).values()) == {Outcome.MISSING}
    assert {row.reason for row in verdicts.rows} == {"no baseline; record one with --update-baselines"}


def test_undecided_verdict_of_a_small_baseline_says_to_record_more():
    few = make_baseline(launches=stored(*launches_near(10.0, 4)))
    row = check(*launches_near(10.6, 3, deviation=0.2), baseline=few)["step_time_p50"]
    assert row.outcome is Outcome.INCONCLUSIVE
    assert row.reason == "only 4 launches in the center; record more with --update-baselines --aorta-record=replace"


def test_center_is_the_median_of_the_center_launches_alone():
    launches = (*stored(*launches_near(20.0, 9), center=False), *stored(*launches_near(10.0, 9), revision=2))
    row = check(*[make_facts()] * 3, baseline=make_baseline(launches=launches))["step_time_p50"]
    assert (row.outcome, row.baseline) == (Outcome.PASS, pytest.approx(10, 1e-3))


def test_slow_rank_is_noted_beside_the_verdicts():
    slow = make_facts(rank_lag_ms=[-1.0, 1.0])
    (note,) = check(slow, baseline=STABLE).notes
    assert note.startswith("straggler: the other ranks wait")


def test_estimate_of_a_metric_is_known_before_any_launch():
    estimate = StoredComparison("case", CONFIG, STABLE, {}, default_priors).estimate(METRICS["step_time_p50"])
    assert sum(estimate.weights.values()) == pytest.approx(1)
    assert list(estimate.counts.values()) == [10]


def lost_by(*losses: float, build=on_cpu) -> list[LaunchFacts]:
    """Return launches with these final losses, a day apart on different machines."""
    return [
        build(final_loss=loss, block=f"{number:012}", recorded_at=stamp(86400 * (1 + number)))
        for number, loss in enumerate(losses)
    ]


LOSS = {"final_loss": Tolerance(0.02)}
NOISY_LOSSES = (2.0, 2.004, 1.996, 2.002, 1.998, 2.001, 1.999, 2.003, 1.997, 2.0)


def check_loss(*losses: float, recorded=(2.0,) * 10, build=on_cpu, max_launches=6) -> Verdict:
    baseline = make_baseline(launches=stored(*lost_by(*recorded, build=build)))
    comparison = StoredComparison(
        "case", CONFIG, baseline, LOSS, lambda metric: default_variance(metric, build().device), max_launches
    )
    return comparison.judge([build(final_loss=loss, block="here") for loss in losses])["final_loss"]


@pytest.mark.parametrize("build", [on_cpu, make_facts])
@pytest.mark.parametrize("recorded", [(2.0,), (2.0,) * 10, NOISY_LOSSES])
def test_unchanged_loss_passes_its_tolerance_at_the_first_launch(build, recorded):
    row = check_loss(2.0, recorded=recorded, build=build)
    assert (row.outcome, row.is_open) == (Outcome.PASS, False)


@pytest.mark.parametrize("build", [on_cpu, make_facts])
@pytest.mark.parametrize("recorded", [(2.0,), (2.0,) * 10, NOISY_LOSSES])
@pytest.mark.parametrize("loss", [2.1, 12.0])
def test_loss_beyond_its_tolerance_is_a_regression_whatever_the_noise_of_times(build, recorded, loss):
    assert check_loss(*[loss] * 3, recorded=recorded, build=build).outcome is Outcome.REGRESSION


def test_loss_within_the_noise_of_its_baseline_is_no_regression():
    noisy = tuple(2.0 + 10 * (loss - 2.0) for loss in NOISY_LOSSES)
    row = check_loss(2.045, 2.05, 2.045, recorded=noisy, max_launches=3)
    assert row.outcome is Outcome.INCONCLUSIVE


LOST_GPU = make_facts(environment={"torch": "2.11.0", "device": "cpu"}, weight_hashes={"10": "f" * 16})


def test_launch_that_computes_on_another_device_than_its_baseline_on_the_platform_is_lost():
    verdicts = check(with_p50(LOST_GPU, 99.0), baseline=STABLE)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.MISSING, "weight_hash": Outcome.MISSING}
    assert all(row.is_lost for row in verdicts.rows)
    assert "the ranks computed on cpu, those of the baseline on cuda; " in verdicts["step_time_p50"].detail


def test_baseline_without_a_device_among_its_facts_is_compared():
    nameless = make_baseline(launches=stored(*[make_facts(environment={})] * 3))
    assert check(make_facts(environment={"device": "cuda"}), baseline=nameless)["step_time_p50"].missing is None


def test_times_of_results_of_two_platforms_are_not_applicable():
    comparison = StoredComparison("case", CONFIG, STABLE, {}, default_priors, kind=ReferenceKind.RESULTS)
    assert comparison.judge([LOST_GPU])["step_time_p50"].outcome is Outcome.NOT_APPLICABLE
