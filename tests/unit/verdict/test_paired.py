"""Verdicts by an A/B reference."""

from __future__ import annotations

import functools

import pytest

from pytest_aorta.common.errors import SpecError
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import default_priors, make_facts, on_cpu, with_p50
from tests.unit.verdict.compared import LONG, chose, compare, outcomes


def test_candidate_is_compared_with_the_reference_in_the_baselines_place():
    rows = outcomes(compare([with_p50(make_facts(), 20.0)] * 3, [make_facts()] * 3))
    assert rows == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}


def test_one_pair_decides_no_time():
    row = compare([with_p50(make_facts(), 20.0)], [make_facts()])["step_time_p50"]
    assert (row.outcome, row.is_open) == (Outcome.INCONCLUSIVE, True)


def test_what_drifts_in_both_alike_is_no_change():
    drift = [1.0, 1.2, 1.5, 1.9, 2.4, 3.0]
    candidates, references = ([with_p50(make_facts(), p50 * level) for level in drift] for p50 in (10.0, 10.01))
    assert compare(candidates, references)["step_time_p50"].outcome is Outcome.PASS


def test_two_versions_on_cpu_are_compared_at_the_tolerance_that_is_asked():
    row = compare([with_p50(on_cpu(), 30.0)] * 6, [on_cpu()] * 6, {"step_time_p50": Tolerance(0.2)})["step_time_p50"]
    assert str(row.tolerance) == "20%"


def test_a_b_of_named_metrics_leaves_out_the_rest():
    verdicts = compare([make_facts(final_loss=2.0)], [make_facts(final_loss=2.0)], only=["final_loss"])
    assert [(row.metric, row.outcome) for row in verdicts.rows] == [("final_loss", Outcome.PASS)]


def test_a_b_by_an_unknown_metric_is_refused():
    with pytest.raises(SpecError, match=r"metrics \['speed'\] are unknown; allowed are \["):
        compare([make_facts()], [make_facts()], only=["speed"])


@pytest.mark.parametrize("none", [[], (), frozenset()])
def test_ab_of_no_metric_is_an_error_that_names_what_is_allowed(none):
    with pytest.raises(SpecError, match=r"compare: metrics is empty; allowed are \[.*'weight_hash'\], or None"):
        compare([make_facts()], [make_facts()], only=none)


def test_loss_of_an_ab_is_decided_by_its_own_pairs():
    priors = functools.partial(default_variance, device="cpu")
    comparison = PairedComparison("case", {"final_loss": Tolerance(0.02)}, priors, ["final_loss"], 6)
    for loss, outcome in ((2.0, Outcome.PASS), (2.1, Outcome.REGRESSION)):
        rows = comparison.judge([on_cpu(final_loss=loss)] * 3, [on_cpu(final_loss=2.0)] * 3)
        assert rows["final_loss"].outcome is outcome


@pytest.mark.parametrize(("here", "there"), [(99, 100), (100, 99)])
def test_ab_of_another_number_of_steps_is_missing(here, there):
    verdicts = compare([make_facts(**LONG | {"num_steps": here})] * 3, [make_facts(**LONG | {"num_steps": there})] * 3)
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "step_time_p99", "weight_hash"], Outcome.MISSING)
    assert verdicts["step_time_p50"].detail == f"the reference ran {there} measured steps, the launch {here}"


def test_pairs_of_different_choices_are_compared_and_the_choices_noted():
    candidates, references = [chose("full on all 4 blocks", with_p50(make_facts(), 15.0))] * 3, [chose("none")] * 3
    verdicts = compare(candidates, references)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}
    assert "activation_checkpointing is 'full on all 4 blocks', the reference's 'none'" in verdicts.notes


def test_notes_of_an_ab_speak_of_its_reference():
    slow = make_facts(rank_lag_ms=[-1.0, 1.0], canary_ms={"gemm_ms": 2.0}, sm_clock_mhz=1000.0)
    verdicts = compare([slow], [make_facts(canary_ms={"gemm_ms": 1.0}, sm_clock_mhz=2000.0)])
    assert len(verdicts.notes) == 3
    assert all("in the reference" in note for note in verdicts.notes)


def test_slow_machine_explains_no_change_of_bits():
    slow = make_facts(canary_ms={"gemm_ms": 2.0}, weight_hashes={"10": "b" * 16, "9": "1" * 16})
    verdicts = compare([slow], [make_facts(canary_ms={"gemm_ms": 1.0})], only=["weight_hash"])
    assert (verdicts["weight_hash"].outcome, verdicts.notes) == (Outcome.REGRESSION, ())


@pytest.mark.parametrize(("version", "outcome"), [("main", Outcome.MISSING), ("", Outcome.NOT_APPLICABLE)])
def test_version_that_computes_on_another_device_is_lost_and_a_variant_may_do_so(version, outcome):
    here = make_facts(environment={"torch": "2.11.0", "device": "cpu"}, weight_hashes={"10": "f" * 16})
    comparison = PairedComparison("case", {}, default_priors, version=version)
    assert outcomes(comparison.judge([here], [make_facts()])) == dict.fromkeys(
        ["step_time_p50", "weight_hash"], outcome
    )
