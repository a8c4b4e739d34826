"""The content of a report without the page: data, tables and plots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.report.data import session_report
from pytest_aorta.report.page.rows import failing_first
from pytest_aorta.report.timeline import drawn_lanes
from pytest_aorta.result.trace.overlap import Lane, overlap_of, union
from pytest_aorta.session.record import TestRecord
from tests.unit.builders import INCONCLUSIVE, PASS, make_case, make_report, make_test, make_verdict
from tests.unit.sample_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return session_report(make_run(folder, tests=6, ranks=2, steps=120), title="a run")


def test_every_launch_of_a_run_is_in_its_report(run):
    assert [test.record.outcome for test in run.tests] == ["failed", "passed", "failed", "passed", "failed", "passed"]
    assert run.warnings == ()
    regressed = run.tests[0].cases[0]
    assert len(regressed.candidate) == regressed.comparison.rows[0].launches == 3
    assert len(regressed.others) == 10


def test_tests_without_a_launch_are_left_out_unless_devices_were_lacking():
    records = [TestRecord("a::plain"), TestRecord("a::gpu", lacked_devices="needs 8 GPUs", outcome="skipped")]
    (test,) = session_report(records, title="").tests
    assert (test.record.nodeid, test.failure) == ("a::gpu", "needs 8 GPUs")


def test_failed_tests_come_first_then_those_with_the_worst_verdict():
    def one(name, outcome, verdict):
        return make_test(name, outcome, make_case(make_verdict(verdict)))

    tests = (
        one("well", "passed", PASS),
        one("open", "passed", INCONCLUSIVE),
        one("broken", "failed", PASS),
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
