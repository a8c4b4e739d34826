from types import SimpleNamespace

import pytest

from pytest_aorta.common.errors import ComparisonFailed
from pytest_aorta.session.launcher import TestSpec
from pytest_aorta.session.record import RunningTest
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts
from tests.unit.builders import compared, make_facts, make_options, make_verdict

REGRESSED = make_verdict(Outcome.REGRESSION, metric="weight_hash")
OTHERS = [outcome for outcome in Outcome if outcome is not Outcome.REGRESSION]


def is_accepted(*rows, fail_on: frozenset[Outcome]) -> bool:
    """Return True if a block whose comparison has these verdicts passes, with its regression marked as expected."""
    test = RunningTest("test_a.py::test_x")
    session = SimpleNamespace(options=make_options(fail_on=fail_on))
    runner = WorkloadRunner(SimpleNamespace(launcher=SimpleNamespace(session=session, spec=TestSpec(), test=test)))
    try:
        with runner.expect_regression("weight_hash") as found:
            runner._concluded(compared("case", make_facts()), Verdicts("case", rows))
    except ComparisonFailed:
        assert not any(row.is_expected for row in test.record.verdicts)
        return False
    assert "Regression: weight_hash" in found.text
    expected = [row.outcome is Outcome.REGRESSION for row in rows]
    assert [row.is_expected for row in test.record.verdicts] == expected
    return True


@pytest.mark.parametrize("named", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize("outcome", OTHERS)
def test_other_verdict_fails_the_block_if_the_options_name_it_or_it_is_missing(outcome, named):
    fail_on = frozenset({outcome} if named else set(OTHERS) - {outcome})
    accepted = is_accepted(REGRESSED, make_verdict(outcome), fail_on=fail_on)
    assert accepted is (not named and outcome is not Outcome.MISSING)


@pytest.mark.parametrize(("is_open", "accepted"), [(True, True), (False, False)])
def test_only_a_metric_that_is_still_open_may_be_inconclusive(is_open, accepted):
    row = make_verdict(Outcome.INCONCLUSIVE, is_open=is_open)
    assert is_accepted(REGRESSED, row, fail_on=frozenset({Outcome.INCONCLUSIVE})) is accepted


@pytest.mark.parametrize(
    "rows", [(), (make_verdict(Outcome.REGRESSION),), (REGRESSED, make_verdict(Outcome.REGRESSION))]
)
def test_regression_of_other_metrics_fails_the_block(rows):
    assert not is_accepted(*rows, fail_on=frozenset())
