from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.common.errors import SpecError
from pytest_aorta.verdict.bitwise import STEP_METRICS, Difference, compare_steps, first_difference, split
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import make_result

HASHES = {"1": "a" * 32, "2": "b" * 32, "3": "c" * 32}


def trained(**changes):
    values = {"weight_hashes": HASHES, "loss": [3.0, 2.0, 1.0], "grad_norm": [0.3, 0.2, 0.1]}
    return make_result([[1.0] * 3] * 2, **values | changes)


def rows(candidate, reference, steps=3, metrics=tuple(STEP_METRICS)):
    return {row.metric: row for row in compare_steps("case", candidate, reference, steps, metrics)}


def test_equal_bits_pass_every_metric():
    assert {row.outcome for row in rows(trained(), trained()).values()} == {Outcome.PASS}


def test_one_ulp_of_one_loss_is_a_regression_that_names_the_step():
    row = rows(trained(loss=[3.0, 2.0000000000000004, 1.0]), trained())["loss"]
    assert (row.outcome, row.value, row.baseline) == (Outcome.REGRESSION, 2.0000000000000004, 2.0)
    assert row.reason == "first in step 2, in 1 of 3 steps"


def test_sign_of_a_zero_is_a_difference():
    assert rows(trained(loss=[0.0, 2.0, 1.0]), trained(loss=[-0.0, 2.0, 1.0]))["loss"].outcome is Outcome.REGRESSION


def test_steps_beyond_those_asked_for_do_not_count():
    assert rows(trained(loss=[3.0, 2.0, 9.0]), trained(), steps=2)["loss"].outcome is Outcome.PASS


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("metric", "lacking", "remedy"),
    [
        (
            "weight_hash",
            {"weight_hashes": {"3": "c" * 32}},
            "1 of steps 1 to 3, but not for step 1; *config hash_every=1",
        ),
        ("loss", {"loss": []}, "0 of steps 1 to 3, but not for step 1; use recorder.loss"),
        ("grad_norm", {"grad_norm": [0.3, 0.2]}, "2 of steps 1 to 3, but not for step 3; use recorder.grad_norm"),
    ],
)
def test_what_one_side_lacks_is_lost_and_never_passes(side, metric, lacking, remedy):
    pair = [trained(), trained()]
    pair[side] = trained(**lacking)
    row = rows(*pair)[metric]
    assert row.is_lost
    assert row.reason.startswith(f"the {('candidate', 'reference')[side]} has values for ")
    assert all(part in row.reason for part in remedy.split("*"))


def test_too_few_measured_steps_are_reported_as_such():
    row = rows(trained(), trained(), steps=25)["loss"]
    assert row.is_lost
    assert "not for step 4; use config steps=25; it measured 3" in row.reason


def test_bits_that_differ_between_settings_of_the_code_are_a_regression_that_names_the_setting():
    facts = {"torch": "2.11.0", "device": "cpu", "num_threads": 1}
    candidate = trained(loss=[3.0, 2.0, 9.0], environment=facts | {"num_threads": 2})
    row = rows(candidate, trained(environment=facts))["loss"]
    assert (row.outcome, row.detail) == (
        Outcome.REGRESSION,
        "first in step 3, in 1 of 3 steps; changed settings: num_threads 1 -> 2",
    )


def test_bits_that_differ_between_environments_are_not_applicable():
    other = trained(loss=[3.0, 2.0, 9.0], environment={"torch": "2.13.0", "device": "cpu"})
    found = rows(other, trained())
    assert found["loss"].outcome is Outcome.NOT_APPLICABLE
    assert found["loss"].reason == "torch is '2.13.0', the reference's '2.11.0'"
    assert found["weight_hash"].outcome is Outcome.PASS


def test_difference_without_deterministic_mode_fails_and_says_so():
    chance = {"torch": "2.11.0", "device": "cuda", "bitwise_reproducible": False}
    row = rows(trained(environment=chance, loss=[3.0, 2.0, 9.0]), trained(environment=chance))["loss"]
    assert row.outcome is Outcome.REGRESSION
    assert "run both in their deterministic mode" in row.reason


def test_first_difference_is_the_earliest_step_and_what_a_step_makes_first():
    odd = trained(loss=[3.0, 2.0, 9.0], grad_norm=[0.3, 0.2, 9.0], weight_hashes=HASHES | {"2": "d" * 32})
    assert first_difference(odd, trained(), 3, list(STEP_METRICS)) == Difference(2, "weight_hash")
    assert first_difference(odd, trained(), 3, ["grad_norm", "loss"]) == Difference(3, "loss")
    assert first_difference(trained(), trained(), 3, list(STEP_METRICS)) is None


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
)
def test_verdict_and_first_difference_agree(here, there):
    steps = min(len(here), len(there))
    candidate, reference = make_result([[1.0]], loss=here), make_result([[1.0]], loss=there)
    [row] = compare_steps("case", candidate, reference, steps, ["loss"])
    odd = [step for step in range(1, steps + 1) if here[step - 1].hex() != there[step - 1].hex()]
    assert first_difference(candidate, reference, steps, ["loss"]) == (Difference(odd[0], "loss") if odd else None)
    assert row.outcome is (Outcome.REGRESSION if odd else Outcome.PASS)


def test_metrics_are_distinguished_by_what_they_are_about():
    assert split(None) == (["loss", "grad_norm", "weight_hash"], [])
    assert split(["step_time_p50", "weight_hash"]) == (["weight_hash"], ["step_time_p50"])
    with pytest.raises(SpecError, match=r"metrics \['los'\] are unknown"):
        split(["los"])


def test_comparison_of_no_metric_is_an_error_that_names_what_is_allowed():
    with pytest.raises(
        SpecError, match=r"compare: metrics is empty; allowed are \[.*'loss', .*'weight_hash'\], or None"
    ):
        split([])
