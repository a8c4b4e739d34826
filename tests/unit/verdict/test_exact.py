"""Exact comparison, and pairs of launches."""

import pytest

from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from tests.unit.builders import (
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    make_baseline,
    make_facts,
    on_cpu,
    with_p50,
)
from tests.unit.verdict.compared import (
    LONG,
    OTHER_WEIGHTS,
    PINNED,
    PINNED_CPU,
    STABLE,
    SURE,
    check,
    chose,
    compare,
    outcomes,
    texts,
)


def test_counts_are_exact_on_any_machine():
    launch = on_cpu(metrics={"num_parameters": 100.0}, block="f" * 12)
    changed = on_cpu(metrics={"num_parameters": 101.0})
    row = check(changed, baseline=baseline_of(launch))["num_parameters"]
    assert (row.outcome, str(row.tolerance)) == (REGRESSION, "exact")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_exact_metric_of_every_launch_is_compared(odd):
    launches = [make_facts() for _ in range(3)]
    launches[odd] = make_facts(weight_hashes={"10": "f" * 16})
    row = check(*launches, baseline=make_baseline())["weight_hash"]
    assert (row.outcome, row.value, row.baseline) == (REGRESSION, "f" * 16, "0" * 16)


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
def test_changed_number_fails_and_names_the_numeric_setting_that_changed(recorded, changed, text, metric):
    baseline = baseline_of(make_facts(environment=recorded, final_loss=1.0))
    candidate = make_facts(
        environment=recorded | changed, weight_hashes=OTHER_WEIGHTS, final_loss=2.0, block="elsewhere"
    )
    row = check(candidate, baseline=baseline, marked={"final_loss": Tolerance(None)})[metric]
    assert row.outcome is REGRESSION
    assert text in row.detail


@pytest.mark.parametrize(("recorded", "changed", "text"), SETTINGS)
def test_equal_hash_of_code_that_changed_a_numeric_setting_passes(recorded, changed, text):
    baseline = baseline_of(make_facts(environment=recorded))
    row = check(make_facts(environment=recorded | changed, block="elsewhere"), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (PASS, ""), text


SLOWER_CPU = PINNED_CPU | {"num_threads": 2}
EARLIER = make_facts().weight_hashes | {"9": "f" * 16}


@pytest.mark.parametrize(
    ("recorded", "changed", "detail"),
    [
        ({}, {"weight_hashes": EARLIER}, "after step 9; after the last step, 10, the weights are equal"),
        (
            {"environment": PINNED_CPU},
            {"weight_hashes": EARLIER, "environment": SLOWER_CPU},
            "after step 9; after the last step, 10, the weights are equal; changed settings: num_threads 1 -> 2",
        ),
        # A setting says nothing of a count.
        (
            {"environment": PINNED_CPU, "metrics": {"num_parameters": 4.0}},
            {"environment": SLOWER_CPU, "metrics": {"num_parameters": 5.0}},
            "",
        ),
    ],
)
def test_regression_says_after_which_step_and_with_which_settings(recorded, changed, detail):
    verdicts = check(make_facts(**changed), baseline=baseline_of(make_facts(**recorded)))
    assert [row.detail for row in verdicts.rows if row.outcome is REGRESSION] == [detail]


def test_variant_with_another_setting_is_compared_and_its_setting_named():
    candidate = make_facts(environment=SLOWER_CPU, weight_hashes=OTHER_WEIGHTS)
    row = compare([candidate], [make_facts(environment=PINNED_CPU)])["weight_hash"]
    assert row.outcome is REGRESSION
    assert "num_threads 1 -> 2" in row.detail


def test_hash_of_an_earlier_step_is_lost_or_differs():
    early = make_facts(weight_hashes={"9": make_facts().weight_hashes["9"]})
    row = check(early, baseline=STABLE)["weight_hash"]
    assert (row.outcome, row.is_lost) == (MISSING, True)
    assert "of step 9, the baseline's that of step 10" in row.detail
    row = check(make_facts(weight_hashes={"9": "f" * 16}), baseline=STABLE)["weight_hash"]
    assert (row.outcome, row.value) == (REGRESSION, "f" * 16)
    assert row.detail.startswith("after step 9; ")


HASHES = {str(step): f"{step:x}" * 16 for step in range(1, 11)}
LAST = {"10": HASHES["10"]}


def test_hashes_of_earlier_steps_that_a_launch_lacks_are_lost_and_named():
    baseline = baseline_of(make_facts(weight_hashes=HASHES))
    kept = {step: value for step, value in HASHES.items() if step not in ("3", "9")}
    row = check(make_facts(weight_hashes=HASHES), make_facts(weight_hashes=kept), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.is_lost) == (MISSING, True)
    assert "no hash of 2 steps for which the baseline has one: 3, 9" in row.detail


def test_hashes_of_earlier_steps_that_only_the_launch_has_are_not_compared():
    baseline = baseline_of(make_facts(weight_hashes=LAST))
    assert check(make_facts(weight_hashes=HASHES), baseline=baseline)["weight_hash"].outcome is PASS


def test_variants_that_hash_other_steps_are_compared_in_the_steps_of_both():
    row = compare([make_facts(weight_hashes=LAST)], [make_facts(weight_hashes=HASHES)])["weight_hash"]
    assert row.outcome is PASS
    assert compare([make_facts(weight_hashes=HASHES | {"4": "f" * 16})], [make_facts(weight_hashes=HASHES)])[
        "weight_hash"
    ].detail.startswith("after step 4; ")


@pytest.mark.parametrize(
    ("recorded", "changed", "detail"),
    [
        ("0000", "ffff", "the weights first differ after step 1"),
        ("0000", "00ff", "the weights first differ after step 4, and are equal after step 2"),
        ("0000", "000f", "the weights first differ after step 8, and are equal after step 4"),
        # Only the last step is hashed by both sides.
        ("   0", "  ff", ""),
    ],
)
def test_weights_that_differ_to_the_end_say_after_which_step_they_first_do(recorded, changed, detail):
    before, after = (
        {step: value * 16 for step, value in zip("1248", side, strict=True) if value != " "}
        for side in (recorded, changed)
    )
    baseline = baseline_of(make_facts(weight_hashes=before))
    row = check(make_facts(weight_hashes=after), baseline=baseline)["weight_hash"]
    assert (row.outcome, row.detail) == (REGRESSION, detail)


def test_a_b_of_named_metrics_leaves_out_the_rest():
    verdicts = compare([make_facts(final_loss=2.0)], [make_facts(final_loss=2.0)], only=["final_loss"])
    assert [(row.metric, row.outcome) for row in verdicts.rows] == [("final_loss", PASS)]


def test_loss_of_an_ab_is_decided_by_its_own_pairs():
    comparison = PairedComparison("case", {"final_loss": Tolerance(0.02)}, ["final_loss"], 6)
    for loss, outcome in ((2.0, PASS), (2.1, REGRESSION)):
        rows = comparison.judge([on_cpu(final_loss=loss)] * 3, [on_cpu(final_loss=2.0)] * 3)
        assert rows["final_loss"].outcome is outcome


@pytest.mark.parametrize(("here", "there"), [(99, 100), (100, 99)])
def test_ab_of_another_number_of_steps_is_missing(here, there):
    verdicts = compare([make_facts(**LONG | {"num_steps": here})] * 3, [make_facts(**LONG | {"num_steps": there})] * 3)
    assert outcomes(verdicts) == dict.fromkeys(["step_time_p50", "step_time_p99", "weight_hash"], MISSING)
    assert f"ran {there} measured steps, the launch {here}" in verdicts["step_time_p50"].detail


def test_change_that_can_be_the_cause_of_another_number_of_steps_is_a_regression():
    changed = make_facts(num_steps=19, weight_hashes=OTHER_WEIGHTS, metrics={"num_parameters": 11})
    recorded = make_facts(metrics={"num_parameters": 10})
    expected = dict.fromkeys(("num_parameters", "weight_hash"), REGRESSION)
    for verdicts in (check(changed, baseline=baseline_of(recorded)), compare([changed], [recorded])):
        assert outcomes(verdicts) == {"step_time_p50": MISSING, **expected}


def test_pairs_of_different_choices_are_compared_and_the_choices_noted():
    candidates, references = [chose("full on all 4 blocks", with_p50(make_facts(), 15.0))] * 3, [chose("none")] * 3
    verdicts = compare(candidates, references)
    assert outcomes(verdicts) == {"step_time_p50": REGRESSION, "weight_hash": PASS}
    assert "activation_checkpointing is 'full on all 4 blocks', the reference's 'none'" in texts(verdicts)


@pytest.mark.parametrize(("version", "outcome"), [("main", MISSING), ("", NOT_APPLICABLE)])
def test_version_that_computes_on_another_device_is_lost_and_a_variant_may_do_so(version, outcome):
    here = make_facts(environment={"torch": "2.11.0", "device": "cpu"}, weight_hashes={"10": "f" * 16})
    comparison = PairedComparison("case", {}, version=version)
    assert outcomes(comparison.judge([here], [make_facts()])) == dict.fromkeys(
        ["step_time_p50", "weight_hash"], outcome
    )
