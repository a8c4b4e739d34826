"""Verdicts on values that must be equal, and on hashes of earlier steps."""

from __future__ import annotations

import pytest

from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import default_priors, make_baseline, make_facts, on_cpu, stored
from tests.unit.verdict.compared import OTHER_WEIGHTS, PINNED, PINNED_CPU, STABLE, SURE, check, compare


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


@pytest.mark.parametrize(
    ("first", "detail"),
    [
        (1, "the weights first differ after step 1"),
        (4, "the weights first differ after step 4, and are equal after step 2"),
        (8, "the weights first differ after step 8, and are equal after step 4"),
    ],
)
def test_weights_that_differ_to_the_end_say_after_which_step_they_first_do(first, detail):
    steps = (1, 2, 4, 8)
    recorded = {str(step): "0" * 16 for step in steps}
    changed = {str(step): ("f" if step >= first else "0") * 16 for step in steps}
    baseline = make_baseline(launches=stored(make_facts(weight_hashes=recorded)))
    row = check(make_facts(weight_hashes=changed), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.REGRESSION, detail)


def test_weights_that_were_hashed_after_one_common_step_have_no_first_step():
    baseline = make_baseline(launches=stored(make_facts(weight_hashes={"8": "0" * 16})))
    row = check(make_facts(weight_hashes={"4": "f" * 16, "8": "f" * 16}), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (Outcome.REGRESSION, "")
