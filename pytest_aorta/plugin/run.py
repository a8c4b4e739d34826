"""The state of one run of pytest, and the hooks of the process that writes the run's results.

pytest loads this module with the plugin, so packages that only tests with a launch need are imported inside functions.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.processes import Terminated, terminable
from pytest_aorta.common.text import visible
from pytest_aorta.plan.options import CODE_QUALITY_SUFFIX, FINDINGS_SUFFIX, Options
from pytest_aorta.plugin.markers import can_launch

if TYPE_CHECKING:
    from pytest_aorta.session.record import TestRecord
    from pytest_aorta.session.search import Bisection
    from pytest_aorta.session.session import Session

# xdist gives the report of a test whose worker crashed none of these.
_PHASES = ("setup", "call", "teardown")
# How often a running launch is said.
_SAY_S = 60.0
# pytest's own outcomes. A plugin that runs a test again has another word, such as `rerun` or `retried`.
_OUTCOMES = ("passed", "failed", "skipped")


class Run:
    """The state that hooks share during one run of pytest.

    Attributes:
        options: Options of the run.
        bisection: The search for a commit that comparisons are part of; None compares with baselines.
        log_fd: The descriptor that lines on running tests go to.
        collected: Node ids of collected tests.
        records: Records of tests that ended, in order.
        lost: Records of tests whose worker of xdist crashed, and of files that could not be collected. Nothing is known
            of their launches, but a run with one of them is not a success.
        passed: Node id of each test that passed, as pytest reports it -> the ids at collection. Tests of several files
            outside of pytest's root folder can share an id of pytest.
        notes: Lines for the end of the summary.
    """

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self.options = options
        self._config = config
        self._resources = ExitStack()
        self.bisection: Bisection | None = None
        self.log_fd = 2
        self.collected: set[str] = set()
        self.records: list[TestRecord] = []
        self.lost: list[TestRecord] = []
        self.passed: dict[str, set[str]] = {}
        self.notes: list[str] = []

    @property
    def passed_ids(self) -> set[str]:
        """The ids at collection of the tests that passed."""
        return set().union(*self.passed.values())

    @cached_property
    def session(self) -> Session:
        """The session of launches, created on first use."""
        from pytest_aorta.launch.watch import SpokenState
        from pytest_aorta.session.session import Session  # imports everything that a launch needs

        session = Session(
            self.options,
            lambda kind: self._config.hook.pytest_aorta_make_launcher(config=self._config, kind=kind),
            line=SpokenState(self.say, _SAY_S),
            say=self.say,
            bisection=self.bisection,
        )
        self._resources.callback(session.close)
        return session

    def say(self, text: str) -> None:
        """Write lines to standard error, or that of a command that keeps it, while a test runs, also under xdist."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            os.write(self.log_fd, f"\naorta: {visible(text)}\n".encode(errors="replace"))

    def close(self) -> None:
        """End the fork servers."""
        self._resources.close()


def record_of(report: pytest.CollectReport | pytest.TestReport) -> TestRecord | None:
    """Return the record attached to the report of a test, and not of one of its subtests; None if there is none."""
    text: str | None = getattr(report, "aorta", None)
    if text is None or _is_subtest(report):
        return None
    from pytest_aorta.common.model import from_text  # neither is needed to collect tests
    from pytest_aorta.session.record import TestRecord

    return from_text(text, TestRecord)


def _is_subtest(report: pytest.CollectReport | pytest.TestReport) -> bool:
    """Return whether a report is of a subtest, by pytest's attribute or that of the plugin pytest-subtests."""
    return hasattr(report, "context")


def _lost(report: pytest.CollectReport | pytest.TestReport) -> TestRecord:
    from pytest_aorta.session.record import TestRecord  # not needed to collect tests

    return TestRecord(report.nodeid, outcome="error", failure=report.longreprtext)


def _later_attempt(report: pytest.TestReport, first: TestRecord) -> TestRecord:
    """Return a record with the end of a test whose report carries the record of its first attempt.

    pytest-retry repeats a test while pytest makes the report of the first attempt. The record of the last attempt comes
    with the report of the teardown.
    """
    from pytest_aorta.session.record import TestRecord, outcome_of  # not needed to collect tests

    failure = report.longreprtext if report.failed else ""
    return TestRecord(first.nodeid, outcome=outcome_of(report), failure=failure, attempt=first.attempt + 1)


def _worker_and_id(report: pytest.TestReport) -> tuple[str, str]:
    """Return the worker of xdist that ran a test, empty without workers, and the test's node id."""
    return getattr(report, "worker_id", ""), report.nodeid


class Controller:
    """The hooks of the process that owns the terminal and the baselines, which is not a worker of xdist."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # Worker and node id -> index of the last record. In xdist's mode `each`, every worker runs every test.
        self.latest: dict[tuple[str, str], int] = {}
        self.failed: set[str] = set()
        self.ended_by = ""
        self.has_collection_error = False
        if (file := run.options.markdown) is not None:
            # They can't be taken for those of this run if the process is killed. Errors are reported by the writer.
            for suffix in (file.suffix, FINDINGS_SUFFIX, CODE_QUALITY_SUFFIX):
                with suppress(OSError):
                    file.with_suffix(suffix).unlink(missing_ok=True)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note Ctrl-C, SIGTERM or ``pytest.exit``, which can give the run any exit status."""
        match excinfo.value:
            case pytest.exit.Exception() as error:
                self.ended_by = f"pytest.exit: {error}"
            case error:
                self.ended_by = "SIGTERM" if isinstance(error, Terminated) else "Ctrl-C"
        if self.run.options.update_baselines:
            self.run.notes.append(
                f"recording was ended by {self.ended_by}; run it again for the tests that had not ended"
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a record of a file with an error."""
        if report.failed:
            self.has_collection_error = True
            self.run.lost.append(_lost(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the id of each test that passed, in this process or in a worker, and the records of tests."""
        if (record := record_of(report)) is not None:
            self._keep(report, record)
        collected: str | None = getattr(report, "aorta_nodeid", None)
        is_pass = report.when == "call" and report.passed and not (_is_subtest(report) or hasattr(report, "wasxfail"))
        if is_pass and collected is not None and report.nodeid not in self.failed:
            self.run.passed.setdefault(report.nodeid, set()).add(collected)
        if report.failed:  # includes a subtest, and a teardown after a call that passed
            self.failed.add(report.nodeid)
            self.run.passed.pop(report.nodeid, None)
        if report.failed and report.when not in _PHASES:
            self._keep_crash(report)
        # Plugins run the test again, pytest-rerunfailures even after a failed teardown.
        if report.outcome not in _OUTCOMES and (index := self.latest.get(_worker_and_id(report))) is not None:
            from pytest_aorta.session.record import RETRIED  # not needed to collect tests

            self.run.passed.pop(report.nodeid, None)
            ended = self.run.records[index]
            self.run.records[index] = ended.replace(outcome=RETRIED, failure=ended.failure or report.longreprtext)

    def _keep(self, report: pytest.TestReport, record: TestRecord) -> None:
        """Add the record of a test; the record of its teardown replaces that of its call."""
        key = _worker_and_id(report)
        former = self.run.records[self.latest[key]] if key in self.latest else None
        if report.when == "teardown" and former is not None:
            if not record.outcome:
                record = record.replace(outcome=former.outcome, failure=former.failure)
            self.run.records[self.latest[key]] = record
            return
        if former is not None and former.is_retried and former.attempt == record.attempt:
            record = _later_attempt(report, record)
        self.latest[key] = len(self.run.records)
        self.run.records.append(record)

    def _keep_crash(self, report: pytest.TestReport) -> None:
        """Keep the failure of a test whose worker of xdist has crashed, which the worker could not report."""
        known = [index for (_, nodeid), index in self.latest.items() if nodeid == report.nodeid]
        if not known or self.run.records[known[-1]].is_retried:
            self.run.lost.append(_lost(report))
            return
        ended = self.run.records[known[-1]]
        failure = "\n".join(filter(None, [ended.failure, report.longreprtext]))
        self.run.records[known[-1]] = ended.replace(outcome="error", failure=failure)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Let SIGTERM end the run as Ctrl-C does while a test can launch, so that what finished before is written."""
        with terminable() if can_launch(item) else nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """As above, in a controller of xdist, which runs no tests itself."""
        with terminable() if session.config.getoption("dist", "no") != "no" else nullcontext():
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the tests that a worker of xdist has collected, when the worker ends."""
        self.run.collected |= set(getattr(node, "workeroutput", {}).get("aorta_collected", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write reports, baselines of tests that passed, and the history; then call the hook of comparisons.

        What can't be written, and a plugin that raises an error, fail the run.
        """
        run = self.run
        if run.records or run.options.report or run.options.markdown:
            self._write_results(session, exitstatus)
        # A search compares no baseline.
        if run.bisection is None and run.options.baselines.is_dir():
            from pytest_aorta.session.baselines import unused_baselines  # reads baselines

            # Tests were left out if the command line names single tests or --lf, or if a file has an error.
            is_named = session.config.getoption("lf", False) or any("::" in arg for arg in session.config.args)
            is_partial = self.has_collection_error or is_named
            whole = set() if is_partial else run.collected
            run.notes += unused_baselines(run.records, run.passed_ids, whole, run.options)

    def _write_results(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        from pytest_aorta.report.write import write_session_reports  # only for a run that can launch
        from pytest_aorta.session.baselines import write_new_baselines
        from pytest_aorta.session.history import keep_history

        run = self.run
        # Before baselines are written: the report shows the baselines that the run was compared with.
        is_broken = exitstatus == pytest.ExitCode.INTERNAL_ERROR
        ended_by = self.ended_by or ("an internal error" if is_broken else "")
        reported, has_reports = write_session_reports(run.records, run.options, lost=run.lost, ended_by=ended_by)
        notes, has_baselines = write_new_baselines(run.records, run.passed_ids, run.options)
        good = has_reports and has_baselines
        run.notes += [*notes, *reported]
        try:
            # After baselines are written: their new revisions are part of the history.
            run.notes += keep_history(run.records, session.config.invocation_params.args, run.options)
        except AortaError as error:
            run.notes.append(f"ERROR {error}")
            good = False
        raised = dict.fromkeys(self._errors_of_plugins(session))
        run.notes += raised
        if (raised or not good) and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _errors_of_plugins(self, session: pytest.Session) -> Iterator[str]:
        """Call the hook of each comparison, and yield a line for each error that a plugin raises there."""
        for comparison in (one for record in self.run.records for one in record.comparisons):
            try:
                session.config.hook.pytest_aorta_comparison(comparison=comparison)
            except Exception as error:  # noqa: BLE001 - the code of another plugin can raise anything
                place = traceback.extract_tb(error.__traceback__)[-1]
                yield (
                    f"ERROR pytest_aorta_comparison: {place.filename}:{place.lineno} raised {type(error).__name__}: "
                    f"{error}; baselines, reports and history were written before"
                )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write findings or with ``-v`` every verdict, the totals, and what was written.

        A single line has no section of its own.
        """
        run = self.run
        is_reported = any(record.is_reported for record in run.records)
        if not is_reported and not run.notes:
            return
        from pytest_aorta.plugin.summary import summary_lines  # only for a run with launches

        # A test that was interrupted has no record, and may have launched.
        found = summary_lines(run.records, terminalreporter.verbosity) if is_reported else []
        lines = [*found, *run.notes]
        if len(lines) > 1:
            terminalreporter.section("aorta")
        for line in lines:
            terminalreporter.line(line)
