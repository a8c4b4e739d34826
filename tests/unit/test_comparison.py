from __future__ import annotations

import time
from dataclasses import replace

import pytest
from unit_builders import make_baseline, make_facts, with_p50

from pytest_aorta.comparison import (
    CPU_SITTING_S,
    TEST_HOOK_KEY,
    Verdict,
    Verdicts,
    compare_launches,
    compare_with_baseline,
    identity,
)
from pytest_aorta.decision import Outcome
from pytest_aorta.errors import SpecError
from pytest_aorta.metrics import EXACT, Tolerance

CONFIG = make_baseline().config


def stamp(age_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s))


def check(facts, baseline=None, marked=None, config=None) -> Verdicts:
    return compare_with_baseline("case", facts, config or CONFIG, baseline, marked or {})


def on_cpu(**changes):
    return make_facts(environment={"torch": "2.11.0", "device": "cpu"}, recorded_at=stamp(60), **changes)


def outcomes(verdicts: Verdicts) -> dict[str, Outcome]:
    return {row.metric: row.outcome for row in verdicts.rows}


def test_same_facts_pass_every_default_metric_they_have():
    verdicts = check(
        make_facts(metrics={"peak_memory_bytes": 1.0}),
        make_baseline(launches=(make_facts(metrics={"peak_memory_bytes": 1.0}),)),
    )
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "peak_memory_bytes", "weight_hash"], Outcome.PASS)


def test_slower_median_is_a_regression_of_that_metric_alone():
    verdicts = check(with_p50(make_facts(), 11.0), make_baseline())
    assert outcomes(verdicts) == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}
    assert str(verdicts["step_time_p50"]) == (
        "step_time_p50: regression: 11 ms, baseline 10 ms, change +10.0%, tolerance 5%"
    )


def test_marked_tolerance_replaces_the_default():
    assert (
        check(with_p50(make_facts(), 11.0), make_baseline(), {"step_time_p50": Tolerance(0.2)})["step_time_p50"].outcome
        is Outcome.PASS
    )


def test_marked_metric_is_compared_that_is_not_by_default():
    row = check(make_facts(), make_baseline(), {"step_time_mean": Tolerance(0.1)})["step_time_mean"]
    assert (row.outcome, row.tolerance) == (Outcome.PASS, "10%")


def test_improvement_says_that_the_baseline_is_stale():
    row = check(with_p50(make_facts(), 5.0), make_baseline())["step_time_p50"]
    assert row.outcome is Outcome.IMPROVED
    assert row.reason == "baseline stale: record the better value with --update-baselines"


def test_absent_baseline_is_missing_and_says_how_to_record_it():
    verdicts = check(make_facts())
    assert set(outcomes(verdicts).values()) == {Outcome.MISSING}
    assert {row.reason for row in verdicts.rows} == {"no baseline; record one with --update-baselines"}


def test_baseline_of_another_config_is_missing_and_names_the_key():
    row = check(make_facts(), make_baseline(), config=CONFIG | {"steps": 30})["step_time_p50"]
    assert row.outcome is Outcome.MISSING
    assert row.reason == (
        "the baseline was recorded with steps=20, the test has 30; record it again with --update-baselines"
    )


@pytest.mark.parametrize("config", [{"steps": 20}, {"steps": 20, "dtype": "float32", "new": 1}])
def test_config_key_that_one_side_lacks_makes_another_config(config):
    assert check(make_facts(), make_baseline(), config=config)["step_time_p50"].outcome is Outcome.MISSING


def test_metric_that_the_launch_lost_is_missing():
    row = check(make_facts(weight_hashes={}), make_baseline())["weight_hash"]
    assert (row.outcome, row.reason) == (Outcome.MISSING, "the launch has no weight_hash")


def test_metric_that_the_baseline_lacks_is_missing():
    row = check(make_facts(), make_baseline(launches=(make_facts(weight_hashes={}),)))["weight_hash"]
    assert row.outcome is Outcome.MISSING
    assert row.reason == "the baseline has no weight_hash; record it with --update-baselines"


def test_marked_metric_that_neither_has_is_missing():
    row = check(make_facts(), make_baseline(), {"tokens_per_s": Tolerance(0.1)})["tokens_per_s"]
    assert (row.outcome, row.value) == (Outcome.MISSING, None)


def test_p99_of_few_steps_is_not_compared_by_default():
    assert "step_time_p99" not in outcomes(check(make_facts(num_steps=99), make_baseline()))
    assert "step_time_p99" in outcomes(check(make_facts(num_steps=100), make_baseline()))


def test_marked_p99_of_few_steps_is_refused_with_the_remedy():
    with pytest.raises(SpecError) as caught:
        check(make_facts(num_steps=20), make_baseline(), {"step_time_p99": Tolerance(0.1)})
    assert str(caught.value) == (
        "tolerance of step_time_p99: 20 steps were measured and it takes at least 100; measure more steps, "
        "or use step_time_tail5"
    )


NAMED = {"step_time_p50": Tolerance(0.05)}


def test_cpu_timing_of_this_sitting_is_judged_no_finer_than_a_doubling():
    baseline = make_baseline(launches=(on_cpu(),))
    assert check(with_p50(on_cpu(), 19.0), baseline, NAMED)["step_time_p50"].outcome is Outcome.PASS
    row = check(with_p50(on_cpu(), 30.0), baseline, NAMED)["step_time_p50"]
    assert (row.outcome, row.tolerance) == (Outcome.REGRESSION, "100%")


def test_cpu_timing_keeps_a_tolerance_wider_than_a_doubling():
    baseline = make_baseline(launches=(on_cpu(),))
    row = check(with_p50(on_cpu(), 30.0), baseline, {"step_time_p50": Tolerance(3.0)})["step_time_p50"]
    assert (row.outcome, row.tolerance) == (Outcome.PASS, "300%")


@pytest.mark.parametrize(
    "recorded",
    [on_cpu(sitting="f" * 12), replace(on_cpu(), recorded_at=stamp(CPU_SITTING_S + 60))],
    ids=["another machine", "an hour ago"],
)
def test_cpu_timing_of_another_sitting_is_not_applicable(recorded):
    verdicts = check(on_cpu(), make_baseline(launches=(recorded,)), NAMED)
    assert outcomes(verdicts) == {"step_time_p50": Outcome.NOT_APPLICABLE, "weight_hash": Outcome.PASS}
    row = verdicts["step_time_p50"]
    assert row.reason == "timing of CPU ranks is compared only within an hour on one machine"
    assert row.baseline == 10.0


def test_gpu_timing_carries_over_between_sittings():
    baseline = make_baseline(launches=(make_facts(sitting="f" * 12, recorded_at="2020-01-01T00:00:00Z"),))
    assert check(make_facts(), baseline)["step_time_p50"].outcome is Outcome.PASS


def test_timing_of_another_launcher_is_not_applicable_and_its_numbers_are():
    verdicts = check(make_facts(launcher="forkserver"), make_baseline())
    assert outcomes(verdicts) == {"step_time_p50": Outcome.NOT_APPLICABLE, "weight_hash": Outcome.PASS}
    assert verdicts["step_time_p50"].reason == "ranks were started by forkserver, the baseline's by torchrun"


def test_numeric_environment_that_differs_is_not_applicable_and_named():
    newer = make_facts(environment=make_facts().environment | {"torch": "2.12.0"})
    row = check(newer, make_baseline())["weight_hash"]
    assert row.outcome is Outcome.NOT_APPLICABLE
    assert row.reason == "torch is '2.12.0', the baseline's '2.11.0'"


def test_timing_is_compared_in_another_numeric_environment():
    newer = make_facts(environment=make_facts().environment | {"torch": "2.12.0"})
    assert check(newer, make_baseline())["step_time_p50"].outcome is Outcome.PASS


def test_environment_value_none_means_the_same_as_an_absent_one():
    recorded = make_facts(environment=make_facts().environment | {"hip": None})
    assert check(make_facts(), make_baseline(launches=(recorded,)))["weight_hash"].outcome is Outcome.PASS


def test_hash_of_a_run_that_is_not_reproducible_is_not_applicable():
    loose = make_facts(environment=make_facts().environment | {"bitwise_reproducible": False}, weight_hashes={"1": "f"})
    row = check(loose, make_baseline(launches=(loose,)))["weight_hash"]
    assert row.outcome is Outcome.NOT_APPLICABLE
    assert "not bitwise reproducible" in row.reason


def test_number_with_a_tolerance_is_compared_in_another_numeric_environment():
    newer = make_facts(environment=make_facts().environment | {"torch": "2.12.0"}, loss=[2.02])
    baseline = make_baseline(launches=(make_facts(loss=[2.0]),))
    assert check(newer, baseline, {"final_loss": Tolerance(0.05)})["final_loss"].outcome is Outcome.PASS
    assert check(newer, baseline, {"final_loss": EXACT})["final_loss"].outcome is Outcome.NOT_APPLICABLE


def test_counts_are_exact_on_any_machine():
    launch = on_cpu(metrics={"num_parameters": 100.0}, sitting="f" * 12)
    changed = on_cpu(metrics={"num_parameters": 101.0})
    row = check(changed, make_baseline(launches=(launch,)))["num_parameters"]
    assert (row.outcome, row.tolerance) == (Outcome.REGRESSION, "exact")


def test_fault_is_no_part_of_the_identity():
    assert identity({"steps": 20, TEST_HOOK_KEY: {"kind": "slowdown"}}) == {"steps": 20}


def test_regression_always_fails_and_missing_where_it_shall():
    rows = (row_of(Outcome.REGRESSION), row_of(Outcome.MISSING), row_of(Outcome.NOT_APPLICABLE))
    verdicts = Verdicts("case", rows)
    assert verdicts.failing(strict=False, missing_fails=True) == list(rows[:2])
    assert verdicts.failing(strict=False, missing_fails=False) == [rows[0]]


def test_strict_fails_every_verdict_that_decides_nothing():
    rows = tuple(map(row_of, Outcome))
    failing = Verdicts("case", rows).failing(strict=True, missing_fails=False)
    assert {row.outcome for row in failing} == set(Outcome) - {Outcome.PASS, Outcome.IMPROVED}


def test_metric_that_the_launch_lost_fails_also_where_missing_baselines_do_not():
    verdicts = check(make_facts(weight_hashes={}), make_baseline())
    assert [row.metric for row in verdicts.failing(strict=False, missing_fails=False)] == ["weight_hash"]


def test_verdict_of_a_metric_that_was_not_compared_is_an_error_that_names_the_others():
    with pytest.raises(KeyError, match=r"step_time_p5 .*\['step_time_p50', 'weight_hash'\]"):
        check(make_facts(), make_baseline())["step_time_p5"]


def test_verdict_survives_json():
    row = replace(row_of(Outcome.NOT_APPLICABLE), reason="why", delta=0.5)
    assert Verdict.from_json(row.to_json()) == row


def row_of(outcome: Outcome) -> Verdict:
    return Verdict("case", "step_time_p50", outcome, 1.0, 1.0, None, "5%")


def test_candidate_is_compared_with_the_reference_in_the_baselines_place():
    rows = outcomes(compare_launches("case", with_p50(make_facts(), 20.0), make_facts(), {}))
    assert rows == {"step_time_p50": Outcome.REGRESSION, "weight_hash": Outcome.PASS}


@pytest.mark.parametrize("lacks", ["candidate", "reference"])
def test_metric_that_one_of_two_launches_lacks_is_missing(lacks):
    launches = {"candidate": make_facts(), "reference": make_facts()} | {lacks: make_facts(weight_hashes={})}
    row = compare_launches("case", launches["candidate"], launches["reference"], {})["weight_hash"]
    assert row.outcome is Outcome.MISSING


def test_two_launches_on_cpu_are_compared_within_a_doubling():
    verdicts = compare_launches("case", with_p50(on_cpu(), 19.0), on_cpu(), NAMED)
    assert verdicts["step_time_p50"].outcome is Outcome.PASS


def test_cpu_timing_that_no_marker_names_is_not_applicable():
    for verdicts in (
        check(with_p50(on_cpu(), 90.0), make_baseline(launches=(on_cpu(),))),
        compare_launches("case", with_p50(on_cpu(), 90.0), on_cpu(), {}),
    ):
        row = verdicts["step_time_p50"]
        assert row.outcome is Outcome.NOT_APPLICABLE
        assert row.reason == "timing of CPU ranks is compared only where a tolerance marker names it"


def test_exact_time_is_not_asked_of_cpu_ranks():
    row = compare_launches("case", with_p50(on_cpu(), 19.0), on_cpu(), {"step_time_p50": EXACT})["step_time_p50"]
    assert (row.outcome, row.tolerance) == (Outcome.PASS, "100%")


def test_a_b_of_named_metrics_leaves_out_the_rest():
    candidate, reference = make_facts(loss=[2.0]), make_facts(loss=[2.0])
    verdicts = compare_launches("case", candidate, reference, {}, ["final_loss"])
    assert [(row.metric, row.outcome) for row in verdicts.rows] == [("final_loss", Outcome.PASS)]


def test_a_b_by_an_unknown_metric_is_refused():
    with pytest.raises(SpecError, match=r"no such metrics \['speed'\]; there are \["):
        compare_launches("case", make_facts(), make_facts(), {}, ["speed"])
