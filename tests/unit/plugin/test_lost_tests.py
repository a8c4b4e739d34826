"""Tests of which pytest has no result: their worker of xdist crashed, or their file can't be imported."""

import pytest

from pytest_aorta.common.model import to_text
from pytest_aorta.plugin.run import Controller, Run
from pytest_aorta.report.markdown import findings, headline
from pytest_aorta.report.write import write_session_reports
from pytest_aorta.session.record import TestRecord
from tests.unit.builders import make_options, ran, replace

PASSED = TestRecord("test_a.py::test_one", outcome="passed", launches=ran(1), can_launch=True)
CRASHED = TestRecord("test_a.py::test_two", outcome="error", failure="worker 'gw1' crashed")


@pytest.fixture
def controller(pytestconfig):
    return Controller(Run(pytestconfig, make_options()))


def report(record: TestRecord, when: str = "call", outcome: str = "passed") -> pytest.TestReport:
    found = pytest.TestReport(record.nodeid, ("test_a.py", 1, ""), {}, outcome, record.failure, when)
    vars(found).update(aorta=to_text(record), aorta_nodeid=record.nodeid)
    return found


def crash(nodeid: str) -> pytest.TestReport:
    """Return the report that xdist makes of a test whose worker has crashed."""
    return pytest.TestReport(nodeid, ("test_a.py", None, ""), {}, "failed", CRASHED.failure, "???")


def test_test_whose_worker_crashed_has_failed(controller):
    controller.pytest_runtest_logreport(report(PASSED))
    controller.pytest_runtest_logreport(crash(CRASHED.nodeid))
    assert controller.run.records == [PASSED]
    assert controller.run.lost == [CRASHED]
    assert list(controller.run.passed) == [PASSED.nodeid]


def test_test_that_passed_and_crashed_its_worker_in_the_teardown_has_failed_once(controller):
    controller.pytest_runtest_logreport(report(PASSED))
    controller.pytest_runtest_logreport(crash(PASSED.nodeid))
    assert controller.run.records == [replace(PASSED, outcome="error", failure=CRASHED.failure)]
    assert (controller.run.lost, controller.run.passed) == ([], {})


def test_crash_after_a_retried_attempt_is_kept_beside_it(controller):
    first = replace(PASSED, outcome="rerun")
    controller.pytest_runtest_logreport(report(first))
    controller.pytest_runtest_logreport(crash(PASSED.nodeid))
    assert controller.run.records == [first]
    assert controller.run.lost == [replace(CRASHED, nodeid=PASSED.nodeid)]


@pytest.mark.parametrize(("records", "is_in_summary"), [([PASSED], True), ([], False)])
def test_lost_tests_are_in_the_markdown_but_alone_not_in_the_summary_of_the_job(
    tmp_path, monkeypatch, records, is_in_summary
):
    options = make_options(markdown=tmp_path / "aorta.md")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    write_session_reports(records, options, lost=[CRASHED])
    text = (tmp_path / "aorta.md").read_text()
    assert text.startswith(f"## {headline(findings([*records, CRASHED]))}\n")
    assert "1 of " in headline(findings([*records, CRASHED]))
    assert "worker 'gw1' crashed" in text
    assert (tmp_path / "step.md").exists() is is_in_summary
