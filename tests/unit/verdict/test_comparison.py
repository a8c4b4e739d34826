from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import TEST_HOOK_KEY, identity, other_config
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import METRICS, Tolerance
from pytest_aorta.verdict.noise.priors import BLOCK_GAP_S, default_variance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict, Verdicts
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

CONFIG = make_baseline().config
STABLE = make_baseline(launches=stored(*launches_near(10.0, 10)))


def check(*facts, baseline=None, marked=None, config=None, max_launches=None) -> Verdicts:
    """Return the verdicts of launches, whose number is the allowed maximum."""
    allowed = max_launches or max(len(facts), 1)
    comparison = StoredComparison("case", config or CONFIG, baseline, marked or {}, default_priors, allowed)
    return comparison.judge(facts)


def compare(candidates, references, marked=None, only=None, max_pairs=6) -> Verdicts:
    return PairedComparison("case", marked or {}, default_priors, only, max_pairs).judge(candidates, references)


def outcomes(verdicts: Verdicts) -> dict[str, Outcome]:
    return {row.metric: row.outcome for row in verdicts.rows}


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
    assert (
        row.reason == "the baseline is stale; record the better value with --update-baselines --aorta-reset-baselines"
    )


def test_absent_baseline_is_missing_and_says_how_to_record_it():
    verdicts = check(make_facts())
    assert set(outcomes(verdicts).values()) == {Outcome.MISSING}
    assert {row.reason for row in verdicts.rows} == {"no baseline; record one with --update-baselines"}


def test_undecided_verdict_of_a_small_baseline_says_to_record_more():
    few = make_baseline(launches=stored(*launches_near(10.0, 4)))
    row = check(*launches_near(10.6, 3, deviation=0.2), baseline=few)["step_time_p50"]
    assert row.outcome is Outcome.INCONCLUSIVE
    assert row.reason == "only 4 launches in the center; record more with --update-baselines --aorta-reset-baselines"


def test_baseline_of_another_config_is_missing_and_names_the_key():
    row = check(make_facts(), baseline=make_baseline(), config=CONFIG | {"steps": 30})["step_time_p50"]
    assert row.outcome is Outcome.MISSING
    assert row.reason == (
        "the baseline was recorded with steps=20, the test has steps=30; record it again with --update-baselines"
    )


def test_every_changed_config_key_is_named():
    recorded = make_baseline(config={"lr": 0.1, "steps": 20, "old": "x", "model": {"layers": 2}})
    row = check(make_facts(), baseline=recorded, config={"lr": 0.2, "steps": 20, "new": None, "model": {"layers": 3}})[
        "step_time_p50"
    ]
    assert row.detail == (
        "the baseline was recorded with lr=0.1, model={'layers': 2}, no key new, old='x', "
        "the test has lr=0.2, model={'layers': 3}, new=None, no key old"
    )


@pytest.mark.parametrize("config", [{"steps": 20}, {"steps": 20, "dtype": "float32", "new": 1}])
def test_config_key_that_one_side_lacks_makes_another_config(config):
    row = check(make_facts(), baseline=make_baseline(), config=config)["step_time_p50"]
    assert row.outcome is Outcome.MISSING


def chose(kinds: str, facts=None):
    facts = facts or make_facts()
    return replace(facts, environment=facts.environment | {"activation_checkpointing": kinds})


@pytest.mark.parametrize("launches", [[chose("full on all 4 blocks")], [chose("none on all 4 blocks"), make_facts()]])
def test_baseline_of_another_choice_of_checkpointing_is_missing_and_names_both(launches):
    baseline = make_baseline(launches=stored(*[chose("none on all 4 blocks")] * 10))
    row = check(*launches, baseline=baseline)["step_time_p50"]
    chosen = launches[-1].environment.get("activation_checkpointing")
    assert (row.outcome, row.reason) == (
        Outcome.MISSING,
        f"the baseline was recorded with activation_checkpointing='none on all 4 blocks', which setup chose, and a "
        f"launch with {chosen!r}; record it again with --update-baselines",
    )


def test_same_choice_of_checkpointing_is_compared():
    launches = [chose("none on all 4 blocks")] * 3
    verdicts = check(*launches, baseline=make_baseline(launches=stored(*launches * 3)))
    assert set(outcomes(verdicts).values()) == {Outcome.PASS}


def test_pairs_of_different_choices_are_compared_and_the_choices_noted():
    candidates, references = [chose("full on all 4 blocks", with_p50(make_facts(), 15.0))] * 3, [chose("none")] * 3
    verdicts = compare(candidates, references)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}
    assert "activation_checkpointing is 'full on all 4 blocks', the reference's 'none'" in verdicts.notes


def test_metric_that_the_launch_lost_is_missing():
    row = check(make_facts(weight_hashes={}), baseline=make_baseline())["weight_hash"]
    assert (row.outcome, row.reason, row.is_lost) == (Outcome.MISSING, "the launch has no weight_hash", True)


def test_metric_that_one_of_several_launches_lost_is_missing():
    row = check(make_facts(), make_facts(weight_hashes={}), make_facts(), baseline=make_baseline())["weight_hash"]
    assert row.is_lost


def test_metric_that_the_baseline_lacks_is_missing():
    row = check(make_facts(), baseline=make_baseline(launches=stored(make_facts(weight_hashes={}))))["weight_hash"]
    assert (row.outcome, row.is_lost) == (Outcome.MISSING, False)
    assert (
        row.reason == "the baseline has no weight_hash; record it again with --update-baselines --aorta-reset-baselines"
    )


def test_marked_metric_that_neither_has_is_missing():
    row = check(make_facts(), baseline=make_baseline(), marked={"tokens_per_s": Tolerance(0.1)})["tokens_per_s"]
    assert (row.outcome, row.value) == (Outcome.MISSING, None)


def test_p99_of_few_steps_is_not_compared_by_default():
    for steps, compared in ((99, False), (100, True)):
        launch = make_facts(num_steps=steps)
        verdicts = check(launch, baseline=make_baseline(launches=stored(launch)))
        assert ("step_time_p99" in outcomes(verdicts)) is compared


def test_marked_p99_of_few_steps_is_refused_with_the_remedy():
    with pytest.raises(SpecError) as caught:
        check(make_facts(num_steps=20), baseline=make_baseline(), marked={"step_time_p99": Tolerance(0.1)})
    assert str(caught.value) == (
        "tolerance of step_time_p99: 20 steps were measured, but step_time_p99 needs at least 100; measure more steps, "
        "or use step_time_tail5"
    )


def test_center_is_the_median_of_the_center_launches_alone():
    launches = (*stored(*launches_near(20.0, 9), center=False), *stored(*launches_near(10.0, 9), revision=2))
    row = check(*[make_facts()] * 3, baseline=make_baseline(launches=launches))["step_time_p50"]
    assert (row.outcome, row.baseline) == (Outcome.PASS, pytest.approx(10, 1e-3))


NAMED = {"step_time_p50": Tolerance(0.05)}
ON_CPU = make_baseline(launches=stored(*[on_cpu()] * 10))


def test_cpu_timing_of_this_block_is_judged_no_finer_than_a_doubling():
    assert (
        check(*[with_p50(on_cpu(), 15.0)] * 3, baseline=ON_CPU, marked=NAMED)["step_time_p50"].outcome is Outcome.PASS
    )
    row = check(*[with_p50(on_cpu(), 30.0)] * 3, baseline=ON_CPU, marked=NAMED)["step_time_p50"]
    assert (row.outcome, str(row.tolerance)) == (Outcome.REGRESSION, "100%")


def test_cpu_timing_keeps_a_tolerance_wider_than_a_doubling():
    marked = {"step_time_p50": Tolerance(3.0)}
    row = check(*[with_p50(on_cpu(), 30.0)] * 3, baseline=ON_CPU, marked=marked)["step_time_p50"]
    assert (row.outcome, str(row.tolerance)) == (Outcome.PASS, "300%")


@pytest.mark.parametrize(
    "recorded",
    [on_cpu(block="f" * 12), on_cpu(recorded_at=stamp(BLOCK_GAP_S["cpu"] + 120))],
    ids=["another machine", "an hour ago"],
)
def test_cpu_timing_of_another_block_is_not_applicable(recorded):
    verdicts = check(on_cpu(), baseline=make_baseline(launches=stored(recorded)), marked=NAMED)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.NOT_APPLICABLE, "weight_hash": Outcome.PASS}
    row = verdicts["step_time_p50"]
    assert row.reason == "times of CPU ranks are compared only within one hour on one machine"
    assert row.baseline == 10.0


def test_gpu_timing_carries_over_between_blocks():
    elsewhere = launches_near(10.0, 10, block="f" * 12, recorded_at="2020-01-01T00:00:00Z")
    assert (
        check(make_facts(), baseline=make_baseline(launches=stored(*elsewhere)))["step_time_p50"].outcome
        is Outcome.PASS
    )


def test_timing_of_another_launcher_is_not_applicable_and_its_numbers_are():
    verdicts = check(make_facts(launcher="forkserver"), baseline=make_baseline())
    assert outcomes(verdicts) == {"step_time_p50": Outcome.NOT_APPLICABLE, "weight_hash": Outcome.PASS}
    assert verdicts["step_time_p50"].reason == "ranks were started by forkserver, the baseline's by torchrun"


NEWER = make_facts().environment | {"torch": "2.12.0"}


def test_numeric_environment_that_differs_is_not_applicable_and_named():
    row = check(make_facts(environment=NEWER), baseline=STABLE)["weight_hash"]
    assert row.outcome is Outcome.NOT_APPLICABLE
    assert row.reason == "torch is '2.12.0', the baseline's '2.11.0'"


def test_reasons_of_an_ab_speak_of_its_reference_not_of_a_baseline():
    hashed = compare([make_facts(environment=NEWER)] * 2, [make_facts()] * 2)["weight_hash"]
    assert (hashed.outcome, hashed.reason) == (Outcome.NOT_APPLICABLE, "torch is '2.12.0', the reference's '2.11.0'")
    timed = compare([make_facts(launcher="forkserver")] * 2, [make_facts()] * 2)["step_time_p50"]
    assert timed.reason == "ranks were started by forkserver, the reference's by torchrun"


def test_timing_is_compared_in_another_numeric_environment():
    assert check(make_facts(environment=NEWER), baseline=STABLE)["step_time_p50"].outcome is Outcome.PASS


def test_environment_value_none_means_the_same_as_an_absent_one():
    recorded = make_facts(environment=make_facts().environment | {"hip": None})
    row = check(make_facts(), baseline=make_baseline(launches=stored(recorded)))["weight_hash"]
    assert row.outcome is Outcome.PASS


def test_hash_of_a_run_that_is_not_reproducible_is_not_applicable():
    loose = make_facts(environment=make_facts().environment | {"bitwise_reproducible": False}, weight_hashes={"1": "f"})
    row = check(loose, baseline=make_baseline(launches=stored(loose)))["weight_hash"]
    assert row.outcome is Outcome.NOT_APPLICABLE
    assert "not bitwise reproducible" in row.reason


def test_number_with_a_tolerance_is_compared_in_another_numeric_environment():
    newer = make_facts(environment=NEWER, final_loss=2.02)
    baseline = make_baseline(launches=stored(*[make_facts(final_loss=2.0)] * 5))
    assert check(newer, baseline=baseline, marked={"final_loss": Tolerance(0.05)})["final_loss"].outcome is Outcome.PASS
    row = check(newer, baseline=baseline, marked={"final_loss": Tolerance(None)})["final_loss"]
    assert row.outcome is Outcome.NOT_APPLICABLE


def test_counts_are_exact_on_any_machine():
    launch = on_cpu(metrics={"num_parameters": 100.0}, block="f" * 12)
    changed = on_cpu(metrics={"num_parameters": 101.0})
    row = check(changed, baseline=make_baseline(launches=stored(launch)))["num_parameters"]
    assert (row.outcome, str(row.tolerance)) == (Outcome.REGRESSION, "exact")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_exact_metric_of_every_launch_is_compared(odd):
    launches = [make_facts() for _ in range(3)]
    launches[odd] = make_facts(weight_hashes={"10": "f" * 16})
    row = check(*launches, baseline=make_baseline())["weight_hash"]
    assert (row.outcome, row.value, row.baseline) == (Outcome.REGRESSION, "f" * 16, "0" * 16)


def test_fault_is_no_part_of_the_identity():
    assert identity({"steps": 20, TEST_HOOK_KEY: {"kind": "slowdown"}}) == {"steps": 20}


LOSS = {"final_loss": Tolerance(0.05)}


def check_losses(here, there, max_launches=5):
    baseline = make_baseline(launches=stored(*[make_facts(final_loss=value) for value in there]))
    facts = [make_facts(final_loss=value) for value in here]
    return check(*facts, baseline=baseline, marked=LOSS, max_launches=max_launches)["final_loss"]


SIGNED = [-1.0, 0.0, 1.0, -0.5, 0.5, -0.7, 0.7, 0.2, -0.2, 0.1]


def test_value_that_is_not_positive_passes_within_the_baselines_range():
    row = check_losses([0.9], SIGNED)
    assert (row.outcome, row.delta, row.reason) == (
        Outcome.PASS,
        None,
        "values are not positive, so their ranges are compared",
    )


def test_value_beyond_the_range_of_signed_ones_asks_for_launches_until_it_can_be_no_chance():
    seen = [check_losses([1.5, 1.6, 1.7, 1.8, 1.9][:count], SIGNED) for count in range(1, 6)]
    assert [row.outcome for row in seen] == [Outcome.INCONCLUSIVE] * 4 + [Outcome.REGRESSION]
    assert [row.is_open for row in seen] == [True] * 4 + [False]


def test_signed_value_below_the_range_improves():
    assert check_losses([-1.5, -1.6, -1.7, -1.8, -1.9], SIGNED).outcome is Outcome.IMPROVED


def test_three_launches_beyond_a_single_one_can_be_chance():
    assert check_losses([-0.7, -0.5, -0.6], [-1.0], max_launches=3).outcome is Outcome.INCONCLUSIVE


def test_signed_value_that_never_varies_needs_three_launches():
    assert check_losses([0.5] * 2, [0.0] * 3).outcome is Outcome.INCONCLUSIVE
    assert check_losses([0.5] * 3, [0.0] * 3).outcome is Outcome.REGRESSION
    assert check_losses([0.0], [0.0] * 3).outcome is Outcome.PASS


def test_signed_value_within_its_tolerance_passes():
    assert check_losses([-99.0], [-100.0] * 3).outcome is Outcome.PASS


def test_one_outlier_among_signed_values_does_not_fail():
    assert check_losses([0.1, 0.2, 99.0], SIGNED).outcome is Outcome.PASS


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


@pytest.mark.parametrize("lacks", ["candidate", "reference"])
def test_metric_that_one_of_two_launches_lacks_is_missing(lacks):
    launches = {"candidate": make_facts(), "reference": make_facts()} | {lacks: make_facts(weight_hashes={})}
    row = compare([launches["candidate"]], [launches["reference"]])["weight_hash"]
    assert row.outcome is Outcome.MISSING


def test_two_versions_on_cpu_are_compared_at_the_tolerance_that_is_asked():
    row = compare([with_p50(on_cpu(), 30.0)] * 6, [on_cpu()] * 6, {"step_time_p50": Tolerance(0.2)})["step_time_p50"]
    assert str(row.tolerance) == "20%"


def test_cpu_timing_that_no_marker_names_is_not_applicable():
    slow = [with_p50(on_cpu(), 90.0)] * 3
    for verdicts in (check(*slow, baseline=ON_CPU), compare(slow, [on_cpu()] * 3)):
        row = verdicts["step_time_p50"]
        assert row.outcome is Outcome.NOT_APPLICABLE
        assert row.reason == "times of CPU ranks are compared only if a tolerance marker names the metric"


def test_stored_exact_time_is_not_asked_of_cpu_ranks():
    row = check(with_p50(on_cpu(), 11.0), baseline=ON_CPU, marked={"step_time_p50": Tolerance(None)})["step_time_p50"]
    assert str(row.tolerance) == "100%"


def test_a_b_of_named_metrics_leaves_out_the_rest():
    verdicts = compare([make_facts(final_loss=2.0)], [make_facts(final_loss=2.0)], only=["final_loss"])
    assert [(row.metric, row.outcome) for row in verdicts.rows] == [("final_loss", Outcome.PASS)]


def test_a_b_by_an_unknown_metric_is_refused():
    with pytest.raises(SpecError, match=r"metrics \['speed'\] are unknown; allowed are \["):
        compare([make_facts()], [make_facts()], only=["speed"])


def test_slow_rank_is_noted_beside_the_verdicts():
    slow = make_facts(rank_lag_ms=[-1.0, 1.0])
    (note,) = check(slow, baseline=STABLE).notes
    assert note.startswith("straggler: the other ranks wait")


def test_estimate_of_a_metric_is_known_before_any_launch():
    estimate = StoredComparison("case", CONFIG, STABLE, {}, default_priors).estimate(METRICS["step_time_p50"])
    assert sum(estimate.weights.values()) == pytest.approx(1)
    assert list(estimate.counts.values()) == [10]


LONG = {"num_steps": 100, "step_time_ms": {"mean": 10.0, "p50": 10.0, "p99": 12.0, "tail5": 12.0, "max": 12.0}}


@pytest.mark.parametrize("num_steps", [1, 99, 101])
def test_launch_of_another_number_of_steps_misses_every_metric_of_the_baseline(num_steps):
    slow_tail = LONG["step_time_ms"] | {"p99": 36.0}
    candidate = make_facts(**LONG | {"num_steps": num_steps, "step_time_ms": slow_tail})
    baseline = make_baseline(launches=stored(*[make_facts(**LONG)] * 10))
    verdicts = check(*[candidate] * 3, baseline=baseline)
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "step_time_p99", "weight_hash"], Outcome.MISSING)
    assert verdicts["step_time_p99"].reason == (
        f"the baseline was recorded with 100 measured steps, the test has {num_steps}; "
        "record it again with --update-baselines"
    )
    # The percentile needs 100 steps, so a launch of fewer steps has lost it and fails whatever --aorta-fail-on says.
    assert verdicts["step_time_p99"].is_lost is (num_steps < 100)


def test_one_of_several_launches_with_another_number_of_steps_is_enough():
    launches = [make_facts(), make_facts(), make_facts(num_steps=19)]
    assert set(outcomes(check(*launches, baseline=STABLE)).values()) == {Outcome.MISSING}


def test_marked_percentile_of_a_baseline_with_too_few_steps_is_missing():
    row = check(make_facts(**LONG), baseline=STABLE, marked={"step_time_p99": Tolerance(0.1)})["step_time_p99"]
    assert row.outcome is Outcome.MISSING
    assert row.detail.startswith("the baseline was recorded with 20 measured steps, the test has 100")


@pytest.mark.parametrize(("here", "there"), [(99, 100), (100, 99)])
def test_ab_of_another_number_of_steps_is_missing(here, there):
    verdicts = compare([make_facts(**LONG | {"num_steps": here})] * 3, [make_facts(**LONG | {"num_steps": there})] * 3)
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "step_time_p99", "weight_hash"], Outcome.MISSING)
    assert verdicts["step_time_p50"].detail == f"the reference ran {there} measured steps, the launch {here}"


SURE = {"torch": "2.11.0", "device": "cuda", "deterministic_algorithms": True, "bitwise_reproducible": True}
REPRODUCIBLE = make_baseline(launches=stored(make_facts(environment=SURE)))
OTHER_WEIGHTS = {"10": "f" * 16}


@pytest.mark.parametrize("dropped", ["torch", "deterministic_algorithms", "bitwise_reproducible"])
def test_changed_hash_of_a_launch_that_drops_a_fact_is_lost(dropped):
    environment = {key: value for key, value in SURE.items() if key != dropped}
    row = check(make_facts(environment=environment, weight_hashes=OTHER_WEIGHTS), baseline=REPRODUCIBLE)["weight_hash"]
    assert (row.outcome, row.is_lost) == (Outcome.MISSING, True)
    assert row.detail.startswith(f"the launch does not report {dropped}, which is {SURE[dropped]!r} in the baseline; ")


@pytest.mark.parametrize("fact", ["deterministic_algorithms", "bitwise_reproducible"])
@pytest.mark.parametrize("metric", ["weight_hash", "final_loss"])
def test_changed_number_of_a_launch_that_is_no_longer_reproducible_is_lost(fact, metric):
    candidate = make_facts(environment=SURE | {fact: False}, weight_hashes=OTHER_WEIGHTS, final_loss=2.0)
    baseline = make_baseline(launches=stored(make_facts(environment=SURE, final_loss=1.0)))
    row = check(candidate, baseline=baseline, marked={"final_loss": Tolerance(None)})[metric]
    assert (row.outcome, row.is_lost) == (Outcome.MISSING, True)
    assert row.detail.startswith(f"{fact} is False, but True in the baseline; ")


@pytest.mark.parametrize("lost", [{}, {"bitwise_reproducible": False}], ids=["kept", "lost"])
def test_hash_of_a_baseline_without_reproducibility_is_not_applicable(lost):
    loose = make_baseline(launches=stored(make_facts(environment=SURE | {"bitwise_reproducible": False})))
    row = check(make_facts(environment=SURE | lost, weight_hashes=OTHER_WEIGHTS), baseline=loose)["weight_hash"]
    assert row.outcome is Outcome.NOT_APPLICABLE


def test_fact_of_the_machine_that_the_baseline_does_not_have_yet_is_another_environment():
    row = check(make_facts(environment=SURE | {"nccl": "2.27"}), baseline=REPRODUCIBLE)["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.NOT_APPLICABLE, "nccl is '2.27', the baseline's None")


PINNED = "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2"
PINNED_CPU = {
    "torch": "2.11.0",
    "device": "cpu",
    "cpu_capability": "AVX2",
    "cpu_kernels": PINNED,
    "num_threads": 1,
    "deterministic_algorithms": False,
    "bitwise_reproducible": True,
}
CUDA = SURE | {"attention": "flash", "tf32_matmul": False}
SETTINGS = [
    (PINNED_CPU, {"num_threads": 2}, "num_threads 1 -> 2"),
    (PINNED_CPU, {"deterministic_algorithms": True}, "deterministic_algorithms False -> True"),
    (PINNED_CPU, {"cpu_kernels": "MKL_CBWR=AVX2"}, f"cpu_kernels '{PINNED}' -> 'MKL_CBWR=AVX2'"),
    (PINNED_CPU, {"cpu_kernels": None}, f"cpu_kernels '{PINNED}' -> None"),
    (
        PINNED_CPU,
        {"cpu_kernels": "MKL_CBWR=AVX2", "cpu_capability": "DEFAULT"},
        f"cpu_capability 'AVX2' -> 'DEFAULT', cpu_kernels '{PINNED}' -> 'MKL_CBWR=AVX2'",
    ),
    (PINNED_CPU, {"cpu_vendor": "x"}, "cpu_vendor None -> 'x'"),
    (CUDA, {"tf32_matmul": True}, "tf32_matmul False -> True"),
    (CUDA, {"attention": "flex"}, "attention 'flash' -> 'flex'"),
    (SURE, {"attention": "flex"}, "attention None -> 'flex'"),
]


@pytest.mark.parametrize(("recorded", "changed", "text"), SETTINGS)
@pytest.mark.parametrize("metric", ["weight_hash", "final_loss"])
def test_changed_number_of_code_that_changed_a_numeric_setting_fails_and_names_the_setting(
    recorded, changed, text, metric
):
    baseline = make_baseline(launches=stored(make_facts(environment=recorded, final_loss=1.0)))
    candidate = make_facts(
        environment=recorded | changed, weight_hashes=OTHER_WEIGHTS, final_loss=2.0, block="elsewhere"
    )
    row = check(candidate, baseline=baseline, marked={"final_loss": Tolerance(None)})[metric]
    assert (row.outcome, row.detail) == (Outcome.REGRESSION, f"changed settings: {text}")


@pytest.mark.parametrize(("recorded", "changed", "text"), SETTINGS)
def test_equal_hash_of_code_that_changed_a_numeric_setting_passes(recorded, changed, text):
    baseline = make_baseline(launches=stored(make_facts(environment=recorded)))
    row = check(make_facts(environment=recorded | changed, block="elsewhere"), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.PASS, ""), text


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ({"torch": "2.12.0"}, "torch is '2.12.0', the baseline's '2.11.0'"),
        ({"cpu_capability": "DEFAULT", "cpu_kernels": None}, "cpu_capability is 'DEFAULT', the baseline's 'AVX2'"),
    ],
)
def test_number_of_code_with_another_setting_on_another_machine_is_not_applicable(machine, text):
    baseline = make_baseline(launches=stored(make_facts(environment=PINNED_CPU)))
    elsewhere = make_facts(environment=PINNED_CPU | machine | {"num_threads": 2}, weight_hashes=OTHER_WEIGHTS)
    row = check(elsewhere, baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.NOT_APPLICABLE, text)


def test_pins_that_code_sets_on_a_cpu_that_the_launcher_does_not_pin_are_a_setting():
    arm = PINNED_CPU | {"cpu_capability": "SVE256", "cpu_kernels": None}
    baseline = make_baseline(launches=stored(make_facts(environment=arm)))
    for changed in (
        {"cpu_kernels": "MKL_CBWR=AVX2"},
        {"cpu_kernels": "ATEN_CPU_CAPABILITY=default", "cpu_capability": "DEFAULT"},
    ):
        row = check(make_facts(environment=arm | changed, weight_hashes=OTHER_WEIGHTS), baseline=baseline)[
            "weight_hash"
        ]
        assert row.outcome is Outcome.REGRESSION


@pytest.mark.parametrize("capability", ["DEFAULT", "SVE256"])
def test_cpus_that_the_launcher_does_not_pin_are_other_machines_by_their_capability(capability):
    old = PINNED_CPU | {"cpu_capability": "NO AVX", "cpu_kernels": None}
    baseline = make_baseline(launches=stored(make_facts(environment=old)))
    elsewhere = make_facts(environment=old | {"cpu_capability": capability}, weight_hashes=OTHER_WEIGHTS)
    assert check(elsewhere, baseline=baseline)["weight_hash"].outcome is Outcome.NOT_APPLICABLE


def test_other_vendor_is_another_machine_if_both_sides_report_the_vendor():
    intel, amd = (PINNED_CPU | {"cpu_vendor": name} for name in ("GenuineIntel", "AuthenticAMD"))
    baseline = make_baseline(launches=stored(make_facts(environment=intel)))
    row = check(make_facts(environment=amd, block="elsewhere"), baseline=baseline)["weight_hash"]
    assert row.detail == "cpu_vendor is 'AuthenticAMD', the baseline's 'GenuineIntel'"
    assert row.outcome is Outcome.NOT_APPLICABLE


def test_setting_is_named_for_an_earlier_step_that_differs():
    baseline = make_baseline(launches=stored(make_facts(environment=PINNED_CPU)))
    hashes = make_facts().weight_hashes | {"9": "f" * 16}
    candidate = make_facts(environment=PINNED_CPU | {"num_threads": 2}, weight_hashes=hashes)
    row = check(candidate, baseline=baseline)["weight_hash"]
    assert row.detail == (
        "after step 9; after the last step, 10, the weights are equal; changed settings: num_threads 1 -> 2"
    )


def test_setting_says_nothing_of_a_count():
    baseline = make_baseline(launches=stored(make_facts(environment=PINNED_CPU, metrics={"num_parameters": 4.0})))
    candidate = make_facts(environment=PINNED_CPU | {"num_threads": 2}, metrics={"num_parameters": 5.0})
    row = check(candidate, baseline=baseline)["num_parameters"]
    assert (row.outcome, row.detail) == (Outcome.REGRESSION, "")


def test_variant_with_another_setting_is_compared_and_its_setting_named():
    candidate = make_facts(environment=PINNED_CPU | {"num_threads": 2}, weight_hashes=OTHER_WEIGHTS)
    row = compare([candidate], [make_facts(environment=PINNED_CPU)])["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.REGRESSION, "changed settings: num_threads 1 -> 2")


def test_equal_hash_of_an_earlier_step_is_lost():
    early = make_facts(weight_hashes={"9": make_facts().weight_hashes["10"]})
    row = check(early, baseline=STABLE)["weight_hash"]
    assert (row.outcome, row.is_lost) == (Outcome.MISSING, True)
    assert row.detail == "the last hash is that of step 9, the baseline's that of step 10"


def test_other_hash_of_an_earlier_step_is_a_regression():
    row = check(make_facts(weight_hashes=make_facts().weight_hashes | {"9": "f" * 16}), baseline=STABLE)["weight_hash"]
    assert (row.outcome, row.value, row.baseline) == (Outcome.REGRESSION, "f" * 16, "1" * 16)
    assert row.detail == "after step 9; after the last step, 10, the weights are equal"


HASHES = {str(step): f"{step:x}" * 16 for step in range(1, 11)}
LAST = {"10": HASHES["10"]}


def test_hashes_of_earlier_steps_that_a_launch_lacks_are_lost_and_named():
    baseline = make_baseline(launches=stored(make_facts(weight_hashes=HASHES)))
    kept = {step: value for step, value in HASHES.items() if step not in ("3", "9")}
    row = check(make_facts(weight_hashes=HASHES), make_facts(weight_hashes=kept), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.is_lost) == (Outcome.MISSING, True)
    assert row.detail == "the launch has no hash of 2 steps for which the baseline has one: 3, 9"


def test_list_of_lost_steps_is_short():
    many = {str(step): "a" * 16 for step in range(1, 101)}
    baseline = make_baseline(launches=stored(make_facts(weight_hashes=many)))
    row = check(make_facts(weight_hashes={"100": "a" * 16}), baseline=baseline)["weight_hash"]
    assert row.detail.startswith("the launch has no hash of 99 steps for which the baseline has one: 1, 2, 3, ")
    assert len(row.detail) < 200


def test_hashes_of_earlier_steps_that_a_version_under_test_lacks_are_lost():
    comparison = PairedComparison("case", {}, default_priors, ["weight_hash"], version="main")
    row = comparison.judge([make_facts(weight_hashes=LAST)], [make_facts(weight_hashes=HASHES)])["weight_hash"]
    assert row.is_lost


def test_hashes_of_earlier_steps_that_only_the_launch_has_are_not_compared():
    baseline = make_baseline(launches=stored(make_facts(weight_hashes=LAST)))
    assert check(make_facts(weight_hashes=HASHES), baseline=baseline)["weight_hash"].outcome is Outcome.PASS


def test_variants_that_hash_other_steps_are_compared_in_the_steps_of_both():
    row = compare([make_facts(weight_hashes=LAST)], [make_facts(weight_hashes=HASHES)])["weight_hash"]
    assert row.outcome is Outcome.PASS
    assert compare([make_facts(weight_hashes=HASHES | {"4": "f" * 16})], [make_facts(weight_hashes=HASHES)])[
        "weight_hash"
    ].detail.startswith("after step 4; ")


def test_stored_launches_of_one_cpu_block_are_compared_later_too():
    old = [on_cpu(recorded_at=stamp(48 * 3600 + age)) for age in (60, 30, 0)]
    row = check(*old, baseline=make_baseline(launches=stored(*old)), marked={"step_time_p50": Tolerance(1.0)})
    assert row["step_time_p50"].outcome is not Outcome.NOT_APPLICABLE


@pytest.mark.parametrize(("block", "outcome"), [("here", Outcome.PASS), ("elsewhere", Outcome.MISSING)])
def test_vendor_that_the_launch_drops_is_lost_on_another_host_only(block, outcome):
    baseline = make_baseline(launches=stored(make_facts(environment=SURE | {"cpu_vendor": "x"}, block="here")))
    assert check(make_facts(environment=SURE, block=block), baseline=baseline)["weight_hash"].outcome is outcome


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


def test_loss_of_an_ab_is_decided_by_its_own_pairs():
    priors = functools.partial(default_variance, device="cpu")
    comparison = PairedComparison("case", LOSS, priors, ["final_loss"], 6)
    for loss, outcome in ((2.0, Outcome.PASS), (2.1, Outcome.REGRESSION)):
        rows = comparison.judge([on_cpu(final_loss=loss)] * 3, [on_cpu(final_loss=2.0)] * 3)
        assert rows["final_loss"].outcome is outcome


def test_notes_of_an_ab_speak_of_its_reference():
    slow = make_facts(rank_lag_ms=[-1.0, 1.0], canary_ms={"gemm_ms": 2.0}, sm_clock_mhz=1000.0)
    verdicts = compare([slow], [make_facts(canary_ms={"gemm_ms": 1.0}, sm_clock_mhz=2000.0)])
    assert len(verdicts.notes) == 3
    assert all("in the reference" in note for note in verdicts.notes)


def test_slow_machine_explains_no_change_of_bits():
    slow = make_facts(canary_ms={"gemm_ms": 2.0}, weight_hashes={"10": "b" * 16, "9": "1" * 16})
    verdicts = compare([slow], [make_facts(canary_ms={"gemm_ms": 1.0})], only=["weight_hash"])
    assert (verdicts["weight_hash"].outcome, verdicts.notes) == (Outcome.REGRESSION, ())


@pytest.mark.parametrize("none", [[], (), frozenset()])
def test_ab_of_no_metric_is_an_error_that_names_what_is_allowed(none):
    with pytest.raises(SpecError, match=r"compare: metrics is empty; allowed are \[.*'weight_hash'\], or None"):
        compare([make_facts()], [make_facts()], only=none)


@pytest.mark.parametrize(
    ("recorded", "config"),
    [
        ({"shard": 1}, {"shard": True}),
        ({"shard": False}, {"shard": 0}),
        ({"shard": True}, {"shard": 1.0}),
        ({"model": {"layers": [4, {"shard": 1}]}}, {"model": {"layers": [4, {"shard": True}]}}),
        ({"model": {"shard": 1}}, {"model": {"shard": 1, "tie": True}}),
        ({"sizes": [1, 2]}, {"sizes": [1]}),
    ],
)
def test_truth_value_is_another_config_than_the_number_it_equals(recorded, config):
    row = check(make_facts(), baseline=make_baseline(config=recorded), config=config)["step_time_p50"]
    assert row.outcome is Outcome.MISSING
    assert row.detail.startswith("the baseline was recorded with ")


@pytest.mark.parametrize(
    ("recorded", "config"),
    [({"lr": 1}, {"lr": 1.0}), ({"shard": True, "sizes": [1, 2.0]}, {"shard": True, "sizes": [1.0, 2]})],
)
def test_integer_is_the_same_config_as_the_float_it_equals(recorded, config):
    launches = stored(*[make_facts()] * 10)
    row = check(make_facts(), baseline=make_baseline(config=recorded, launches=launches), config=config)
    assert row["step_time_p50"].outcome is Outcome.PASS


_VALUES = st.recursive(
    st.booleans() | st.sampled_from([0, 1, "1", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(_VALUES, _VALUES)
def test_configs_are_equal_exactly_if_their_json_is(one, other):
    is_same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (other_config({"key": one}, {"key": other}) is None) is is_same
