"""The content of a report without the page: data, tables, plots and summary."""

import json
from statistics import geometric_mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.report.data import Case, Launch, Report, session_report
from pytest_aorta.report.page.rows import (
    failing_first,
)
from pytest_aorta.report.summary import SCHEMA, ratio, summary
from pytest_aorta.report.timeline import drawn_lanes
from pytest_aorta.result.facts import STEP_TIMES
from pytest_aorta.result.trace.overlap import Lane, overlap_of, union
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import (
    make_baseline,
    make_facts,
    make_report,
    make_result,
    make_test,
    make_verdict,
    schema_violation,
    stored,
)
from tests.unit.sample_run import make_run


def a_result(**changes):
    return make_result(**({"rank_step_times_ms": [[10.0, 11.0], [10.5, 10.5]]} | changes))


def as_launch(number: int = 1, **changes) -> Launch:
    result = a_result(**changes)
    return Launch(number, result, result.facts)


def as_report(*cases: Case) -> Report:
    return make_report(make_test("a.py::test_b", "passed", *cases))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return session_report(make_run(folder, tests=6, ranks=2, steps=120), title="a run")


def test_every_launch_of_a_run_is_in_its_report(run):
    assert [test.record.outcome for test in run.tests] == ["failed", "passed", "failed", "passed", "failed", "passed"]
    assert run.warnings == ()
    regressed = run.tests[0].cases[0]
    assert len(regressed.candidate) == regressed.verdicts[0].launches == 3
    assert len(regressed.others) == 10


def test_tests_without_a_launch_are_left_out_unless_devices_were_lacking():
    records = [TestRecord("a::plain"), TestRecord("a::gpu", lacked_devices="needs 8 GPUs", outcome="skipped")]
    (test,) = session_report(records, title="").tests
    assert (test.record.nodeid, test.failure) == ("a::gpu", "needs 8 GPUs")


def test_failed_tests_come_first_then_those_with_the_worst_verdict():
    def one(name, outcome, verdict):
        return make_test(name, outcome, Case("c", (make_verdict(verdict),)))

    tests = (
        one("well", "passed", Outcome.PASS),
        one("open", "passed", Outcome.INCONCLUSIVE),
        one("broken", "failed", Outcome.PASS),
    )
    report = make_report(*tests, make_test("no launch", "failed"))
    names = [report.tests[place].record.nodeid for place in failing_first(report)]
    assert names == ["no launch", "broken", "open", "well"]


# Overlap

EDGES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 90)), max_size=12).map(
    lambda pairs: union([(begin * 1000, (begin + length) * 1000) for begin, length in pairs])
)


@given(EDGES, EDGES, EDGES, EDGES)
def test_exposed_lane_is_as_long_as_the_measured_exposed_communication(compute, gather, scatter, wait):
    lanes = {"compute": compute, "all_gather": gather, "reduce_scatter": scatter, "wait": wait}
    capture = overlap_of(lanes, [(0, 10**6)])
    exposed = drawn_lanes(capture.timeline)[Lane.EXPOSED]
    assert sum(end - begin for begin, end in exposed) == pytest.approx(capture.steps[0].exposed_comm_ms, abs=1e-6)


# The summary


def test_summary_of_a_run_fits_its_schema(run):
    document = json.loads(json.dumps(summary(run), allow_nan=False))
    assert schema_violation(document, SCHEMA) is None
    assert document["tests"] == {"failed": 3, "passed": 3}
    first = document["cases"][0]
    assert first["num_launches"] == {"candidate": 3, "reference": 10}
    p50 = first["metrics"]["step_time_p50"]
    assert p50["ratio"] == pytest.approx(1.083, rel=0.01)
    assert p50["verdict"] == "regression"
    assert p50["ratio"] == p50["candidate"] / p50["reference"]


def p50_case(here: float, there: float) -> Case:
    candidate = Launch(1, a_result(), make_facts(step_time_ms=dict.fromkeys(STEP_TIMES, here)))
    other = make_facts(step_time_ms=dict.fromkeys(STEP_TIMES, there))
    return Case("c", (), (candidate,), baseline=make_baseline(launches=stored(other)))


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=5))
def test_mean_ratio_is_inverted_when_the_sides_are_swapped(pairs):
    ratios = summary(as_report(*(p50_case(a, b) for a, b in pairs)))["ratios"]["step_time_p50"]
    swapped = summary(as_report(*(p50_case(b, a) for a, b in pairs)))["ratios"]["step_time_p50"]
    assert ratios["geometric_mean"] * swapped["geometric_mean"] == pytest.approx(1)
    assert ratios["geometric_mean"] == pytest.approx(geometric_mean([a / b for a, b in pairs]))
    assert ratios["cases"] == len(pairs)
    assert ratios["lowest"] <= ratios["geometric_mean"] * (1 + 1e-9)


@pytest.mark.parametrize(("here", "there"), [(None, 1.0), (1.0, None), (1.0, 0.0), ("ab", "ab"), (1e308, 1e-308)])
def test_there_is_no_ratio_of_what_can_not_be_divided(here, there):
    assert ratio(here, there) is None
