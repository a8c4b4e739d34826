"""pytest's hooks. Each one delegates to another package.

pytest loads this module in every run of an environment that has pytest-aorta installed. Therefore packages that only
tests with a launch need are imported inside hooks, when the first such test needs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.signals import terminable
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.profiler import check_profiler
from pytest_aorta.plan.world import check_budget
from pytest_aorta.plugin.markers import FIXTURE, MARKERS
from pytest_aorta.plugin.options import add_options, read_options

if TYPE_CHECKING:
    from pytest_aorta.plan.world import Device
    from pytest_aorta.plugin.progress_line import ProgressLine
    from pytest_aorta.session.record import TestRecord
    from pytest_aorta.session.runner import WorkloadRunner
    from pytest_aorta.session.session import Session
    from pytest_aorta.session.spec import TestSpec
    from pytest_aorta.session.world import DistributedWorld


class Run:
    """The state that hooks share during one run of pytest.

    Attributes:
        options: Options of the run.
        line: Progress line on the terminal; None where it is not wanted.
        collected: Node ids of collected tests.
        records: Records of tests that ended, in order.
        passed: Node id of each test that passed, as pytest reports it -> the id at collection.
        notes: Lines for the end of the summary.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.line: ProgressLine | None = None
        self.collected: set[str] = set()
        self.records: list[TestRecord] = []
        self.passed: dict[str, str] = {}
        self.notes: list[str] = []

    @cached_property
    def devices(self) -> list[Device]:
        """The visible GPUs; the driver is asked once, on first use."""
        from pytest_aorta.plan.gpus import visible_devices  # only a run that needs devices asks the driver

        return visible_devices() if self.options.device != "cpu" else []

    @cached_property
    def session(self) -> Session:
        """The session of launches, created on first use."""
        from pytest_aorta.session.session import Session  # imports everything that a launch takes

        session = Session(self.options)
        session.line = self.line
        if "devices" in vars(self):  # else the driver is asked inside the test, which reports its error
            session.devices = self.devices
        return session

    def close(self) -> None:
        """End the fork servers, remove the worktrees of A/B references, and close the progress line."""
        try:
            if "session" in vars(self):
                self.session.close()
        finally:
            if self.line is not None:
                self.line.close()


# Options of pytest with which no test runs. An editor collects tests on machines without their GPUs and profilers.
_SHOWING = ("collectonly", "showfixtures", "show_fixtures_per_test", "markers")

RUN = pytest.StashKey[Run]()
NODE_ID = pytest.StashKey[str]()
SPEC = pytest.StashKey["TestSpec"]()
RECORD = pytest.StashKey["TestRecord"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini keys, when the plugin is loaded."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check options and register markers, once the command line and the ini file are parsed."""
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    try:
        run = Run(replace(read_options(config), command=_command(config)))
        if run.options.report is not None:
            from pytest_aorta.report.write import require_packages  # only for a run with a report

            require_packages()
        if not any(config.getoption(name, False) for name in _SHOWING):
            if run.options.gpus is not None:
                check_budget(run.options, run.devices)
            check_profiler(run.options.profiler)
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run


def _command(config: pytest.Config) -> tuple[str, ...]:
    """Return the words of the command line, which a worker of xdist receives from the controller."""
    if (given := getattr(config, "workerinput", {}).get("aorta_command")) is not None:
        return tuple(given)
    return ("pytest", *map(os.fspath, config.invocation_params.args))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the command line to a worker of xdist, when the controller starts the worker."""
    node.workerinput["aorta_command"] = node.config.stash[RUN].options.command


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release what the run holds, before pytest ends."""
    if RUN in config.stash:
        config.stash[RUN].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return one line for pytest's header: devices, torch, platform, baselines; none where tests are only collected."""
    if config.option.collectonly:  # asking the driver takes longer than collecting a small suite
        return []
    from pytest_aorta.plugin.header import header

    run = config.stash[RUN]
    try:
        return [header(run.options, run.devices)]
    except AortaError as error:  # each test that needs devices fails with this error
        return [f"aorta: {error}"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Check the markers of the tests that a collector has found; a wrong marker is a collection error."""
    report = yield
    problems: dict[str, str] = {}
    for item in report.result or ():
        if isinstance(item, pytest.Item):
            try:
                _read_markers(item)
            except AortaError as error:
                problems[item.nodeid] = str(error)
            # Stored now, since the loadgroup mode of xdist adds the group to the node id later.
            item.stash[NODE_ID] = item.nodeid
            collector.config.stash[RUN].collected.add(item.nodeid)
    if problems:
        lines = [f"{nodeid}: {problem}" for nodeid, problem in problems.items()]
        report.outcome, report.longrepr, report.result = "failed", "\n".join(lines), []
        # As for any collection error: pytest passes the call on to pytest_exception_interact, from which editors read.
        vars(report)["call"] = pytest.CallInfo.from_call(lambda: _refuse(report.longrepr), "collect")
        # As text, since xdist transfers only plain values.
        vars(report)["aorta_problems"] = json.dumps(problems)
    return report


def _refuse(text: object) -> NoReturn:
    raise pytest.Collector.CollectError(text)


def _read_markers(item: pytest.Item) -> None:
    marks = list(item.iter_markers())
    is_ours = FIXTURE in getattr(item, "fixturenames", ())
    if not is_ours and not any(mark.name in MARKERS for mark in marks):
        return
    from pytest_aorta.plugin.read_markers import read_markers  # needs the table of metrics

    plugins = item.config.pluginmanager
    has_pytest_timeout = plugins.has_plugin("timeout") or plugins.is_blocked("timeout")
    item.stash[SPEC] = read_markers(marks, refuse_timeout=is_ours and not has_pytest_timeout)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give the test a new record, each time that pytest or a plugin such as pytest-rerunfailures runs the test."""
    from pytest_aorta.session.record import TestRecord  # not needed to collect tests

    former = item.stash.get(RECORD, None)
    # pytest-rerunfailures counts over all workers of xdist.
    attempt = getattr(item, "execution_count", former.attempt + 1 if former else 1)
    can_launch = FIXTURE in getattr(item, "fixturenames", ())
    item.stash[RECORD] = TestRecord(item.stash[NODE_ID], attempt=attempt, can_launch=can_launch)


@pytest.fixture
def distributed_world(request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
    """The ranks that the test may start, as its ``world`` marker asks; skips the test if devices are missing."""
    from pytest_aorta.plugin.fixtures import make_world  # only tests with a launch need it

    yield from make_world(request, request.config.stash[RUN].session, *_state(request.node))


@pytest.fixture
def workload(request: pytest.FixtureRequest, distributed_world: DistributedWorld) -> WorkloadRunner:
    """Runs workloads on ``distributed_world`` and compares their results."""
    run = request.config.stash[RUN]
    return run.session.runner(distributed_world, run.options, *_state(request.node))


def _state(item: pytest.Item) -> tuple[TestSpec, TestRecord]:
    """Return the markers of a test, read at collection or of a test without any, and the record of this run."""
    from pytest_aorta.session.spec import TestSpec

    return item.stash.get(SPEC, TestSpec()), item.stash[RECORD]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the test's record to its report, which xdist sends to the controller."""
    report = yield
    record = item.stash.get(RECORD, None)
    if record is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
        from pytest_aorta.session.record import outcome_of, properties

        others = [entry for entry in item.user_properties if not entry[0].startswith("aorta.")]
        item.user_properties[:] = others + properties(record)
        report.user_properties = list(item.user_properties)
        record.outcome = outcome_of(report)
        # The message of an AortaError is complete; for any other error the traceback helps.
        if report.outcome != "passed" and call.excinfo is not None:
            ours = isinstance(call.excinfo.value, AortaError)
            record.failure = str(call.excinfo.value) if ours else report.longreprtext
        # As text, since xdist transfers only plain values.
        vars(report)["aorta"] = json.dumps(record.to_json())
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Give a test that passed without a decision a letter and a count of its own: neither skipped nor passed."""
    if report.when != "call" or not report.passed or hasattr(report, "wasxfail"):
        return None
    record = _record_of(report)
    if record is None or not record.is_undecided:
        return None
    return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})


def _record_of(report: pytest.CollectReport | pytest.TestReport) -> TestRecord | None:
    """Return the record that travels with a report, if there is one."""
    text: str | None = getattr(report, "aorta", None)
    if text is None:
        return None
    from pytest_aorta.session.record import TestRecord  # not needed to collect tests

    return TestRecord.from_json(json.loads(text))


def _worker_and_id(report: pytest.TestReport) -> tuple[str, str]:
    """Return the worker of xdist that ran a test, empty without workers, and the test's node id."""
    return getattr(report, "worker_id", ""), report.nodeid


class Controller:
    """The hooks of the process that owns the terminal and the baselines, which is not a worker of xdist."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # Worker and node id -> record. In xdist's mode `each`, every worker runs every test.
        self.latest: dict[tuple[str, str], TestRecord] = {}
        self.failed: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a record of each test whose markers are wrong, which is therefore not run."""
        text: str | None = getattr(report, "aorta_problems", None)
        if text is None:
            return
        from pytest_aorta.session.record import TestRecord  # not needed to collect tests

        for nodeid, problem in json.loads(text).items():
            self.run.records.append(TestRecord(nodeid, outcome="error", failure=problem, can_launch=True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of each test that ended, in this process or in a worker."""
        if (record := _record_of(report)) is not None:
            self.run.records.append(record)
            self.latest[_worker_and_id(report)] = record
            if report.passed and not hasattr(report, "wasxfail") and report.nodeid not in self.failed:
                self.run.passed[report.nodeid] = record.nodeid
        if report.failed:  # includes a teardown after a call that passed
            self.failed.add(report.nodeid)
            self.run.passed.pop(report.nodeid, None)
            if report.when == "teardown" and (ended := self.latest.get(_worker_and_id(report))):
                ended.outcome, ended.failure = "error", ended.failure or report.longreprtext
        # pytest-rerunfailures runs the test again, also after a teardown that failed.
        if str(report.outcome) == "rerun" and (ended := self.latest.get(_worker_and_id(report))):
            self.run.passed.pop(report.nodeid, None)
            ended.outcome, ended.failure = str(report.outcome), ended.failure or report.longreprtext

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Let SIGTERM end the run as Ctrl-C does, so that baselines and the report of finished tests are written."""
        with terminable():
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the tests that a worker of xdist has collected, when the worker ends."""
        self.run.collected |= set(getattr(node, "workeroutput", {}).get("aorta_collected", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write reports, baselines of tests that passed, and the history; a failure of the last two fails the run."""
        if session.config.option.collectonly:  # reading baselines takes longer than collecting
            return
        from pytest_aorta.report.write import write_session_reports  # not needed to collect tests
        from pytest_aorta.session.baselines import unused_baselines, write_new_baselines
        from pytest_aorta.session.history.keep import keep_history

        run = self.run
        # Before baselines are written: the report shows the baselines that the run was compared with.
        is_cut_short = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        reported = write_session_reports(run.records, run.options, is_cut_short=is_cut_short)
        notes, good = write_new_baselines(run.records, run.passed.values(), run.options)
        run.notes += [*notes, *reported]
        try:
            # After baselines are written: their new revisions are part of the history.
            run.notes += keep_history(run.records, session.config.invocation_params.args, run.options)
        except AortaError as error:
            run.notes.append(f"ERROR {error}")
            good = False
        if not good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        # Where the command line names single tests, the other tests of their files were not collected.
        whole = set() if any("::" in arg for arg in session.config.args) else run.collected
        run.notes += unused_baselines(run.records, run.passed.values(), whole, run.options)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write durations on request, findings or with ``-v`` every verdict, the totals, and what was written.

        A single line has no section of its own.
        """
        run = self.run
        if terminalreporter.config.option.collectonly:  # tests with wrong markers are among the errors
            return
        if not any(record.is_reported for record in run.records) and not run.notes:
            return
        from pytest_aorta.plugin.summary import durations_lines, summary_lines  # only for a run with launches

        given = terminalreporter.config.option  # pytest's own options, --durations and --durations-min
        wanted = given.durations is not None
        durations = durations_lines(run.records, given.durations, given.durations_min or 0.0) if wanted else []
        lines = [*durations, *summary_lines(run.records, terminalreporter.verbosity), *run.notes]
        if len(lines) > 1:
            terminalreporter.section("aorta")
        for line in lines:
            terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Open the progress line and register the controller's hooks, unless this process is a worker of xdist."""
    run = session.config.stash[RUN]
    if not session.config.option.collectonly:
        from pytest_aorta.plugin.progress_line import open_line

        run.line = open_line(run.options.progress, session.config)
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Controller(run), "aorta-controller")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the collected node ids of a worker of xdist to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["aorta_collected"] = sorted(session.config.stash[RUN].collected)
