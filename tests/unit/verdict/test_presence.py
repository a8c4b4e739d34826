"""Verdicts on metrics that one side lacks."""

from __future__ import annotations

import pytest

from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import make_baseline, make_facts, stored
from tests.unit.verdict.compared import check, compare


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
        row.reason == "the baseline has no weight_hash; record it again with --update-baselines --aorta-record=replace"
    )


def test_marked_metric_that_neither_has_is_missing():
    row = check(make_facts(), baseline=make_baseline(), marked={"tokens_per_s": Tolerance(0.1)})["tokens_per_s"]
    assert (row.outcome, row.value) == (Outcome.MISSING, None)


@pytest.mark.parametrize("lacks", ["candidate", "reference"])
def test_metric_that_one_of_two_launches_lacks_is_missing(lacks):
    launches = {"candidate": make_facts(), "reference": make_facts()} | {lacks: make_facts(weight_hashes={})}
    row = compare([launches["candidate"]], [launches["reference"]])["weight_hash"]
    assert row.outcome is Outcome.MISSING
