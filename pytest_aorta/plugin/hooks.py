"""pytest's hooks, and nothing else: each hands over to a stage and never imports torch."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.signals import terminable
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.profiler import check_profiler
from pytest_aorta.plan.world import check_budget
from pytest_aorta.plugin.fixtures import RECORD, SPEC, make_runner, make_world
from pytest_aorta.plugin.markers import MARKERS, read_markers
from pytest_aorta.plugin.options import add_options, read_options
from pytest_aorta.plugin.progress_line import ProgressLine, open_line
from pytest_aorta.plugin.summary import durations_lines, header, summary_lines
from pytest_aorta.report.write import require_packages, tell
from pytest_aorta.session.baselines import unused_baselines, write_new_baselines
from pytest_aorta.session.record import TestRecord, outcome_of, properties
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.session import Session
from pytest_aorta.session.world import DistributedWorld


class PytestSession(Session):
    """What the hooks share during one run of pytest."""

    line: ProgressLine | None

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.collected: set[str] = set()
        self.records: list[TestRecord] = []
        self.passed: dict[str, str] = {}
        self.notes: list[str] = []

    def close(self) -> None:
        """Give the terminal back, too."""
        try:
            super().close()
        finally:
            if self.line is not None:
                self.line.close()


SESSION = pytest.StashKey[PytestSession]()
NODE_ID = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini values."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check options and register markers."""
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    try:
        session = PytestSession(read_options(config))
        if session.options.report is not None:
            require_packages()
        if session.options.gpus is not None:
            check_budget(session.options, session.devices)
        check_profiler(session.options.profiler)
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[SESSION] = session


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what warm launches were forked from, and remove what was checked out for them."""
    if SESSION in config.stash:
        config.stash[SESSION].close()


def pytest_report_header(config: pytest.Config) -> str:
    """One line: devices, torch, platform, baselines."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "not installed"
    session = config.stash[SESSION]
    try:
        return header(session.options, session.devices, torch_version)
    except AortaError as error:  # each test that needs devices will say so
        return f"aorta: {error}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Check the markers of collected tests, so that a wrong one is a collection error with its reason."""
    report = yield
    problems = []
    for item in report.result or ():
        if isinstance(item, pytest.Item):
            try:
                item.stash[SPEC] = read_markers(item.iter_markers())
            except AortaError as error:
                problems.append(f"{item.nodeid}: {error}")
            # Here, since xdist's loadgroup adds the group to the node id later.
            item.stash[NODE_ID] = item.nodeid
            collector.config.stash[SESSION].collected.add(item.nodeid)
    if problems:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(problems), []
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give the test a record of its own, a fresh one each time that a plugin runs it again."""
    item.stash[RECORD] = TestRecord(item.stash[NODE_ID])


@pytest.fixture
def distributed_world(request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
    """The ranks this test may start, as its ``world`` marker asks; skips where devices are lacking."""
    yield from make_world(request, request.config.stash[SESSION])


@pytest.fixture
def workload(request: pytest.FixtureRequest, distributed_world: DistributedWorld) -> WorkloadRunner:
    """Runs a workload on ``distributed_world`` and compares what it measured."""
    return make_runner(request, request.config.stash[SESSION], distributed_world)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the test's record to its report, which takes it along between xdist's processes."""
    report = yield
    record = item.stash.get(RECORD, None)
    if record is not None and (report.when == "call" or (report.when == "setup" and not report.passed)):
        others = [entry for entry in item.user_properties if not entry[0].startswith("aorta.")]
        item.user_properties[:] = others + properties(record)
        report.user_properties = list(item.user_properties)
        record.outcome = outcome_of(report)
        # An error of ours says all there is; of any other, where it came from is what helps.
        if report.outcome != "passed" and call.excinfo is not None:
            ours = isinstance(call.excinfo.value, AortaError)
            record.failure = str(call.excinfo.value) if ours else report.longreprtext
        # Text, since xdist carries only plain values.
        vars(report)["aorta"] = json.dumps(record.to_json())
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """A test that passed without a decision has a letter and a count of its own; it is no skip, and not green."""
    if report.when != "call" or not report.passed or hasattr(report, "wasxfail"):
        return None
    text: str | None = getattr(report, "aorta", None)
    if text is None or not TestRecord.from_json(json.loads(text)).is_undecided:
        return None
    return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})


class Controller:
    """The hooks of the process that owns the terminal and the baselines; xdist's workers have none of it."""

    def __init__(self, session: PytestSession) -> None:
        self.session = session
        self.latest: dict[str, TestRecord] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what tests left, from whichever process they ran in."""
        text: str | None = getattr(report, "aorta", None)
        if text is not None:
            record = TestRecord.from_json(json.loads(text))
            self.session.records.append(record)
            self.latest[report.nodeid] = record
            if report.passed and not hasattr(report, "wasxfail"):
                self.session.passed[report.nodeid] = record.nodeid
        if report.failed:  # also a teardown, after a call that passed
            self.session.passed.pop(report.nodeid, None)
            if report.when == "teardown" and (ended := self.latest.get(report.nodeid)):
                ended.outcome, ended.failure = "error", ended.failure or report.longreprtext

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """SIGTERM ends the run as Ctrl-C does, so that baselines and the report of what is done are written."""
        with terminable():
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Learn what a worker of xdist collected."""
        self.session.collected |= set(getattr(node, "workeroutput", {}).get("aorta_collected", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the baselines of tests that passed; one that can't be written turns the run red."""
        own = self.session
        # Before baselines are written: a run is told beside what it was compared with.
        told = [] if session.config.option.collectonly else tell(own.records, own.options)
        notes, good = write_new_baselines(own.records, own.passed.values(), own.options)
        own.notes += [*notes, *told]
        if not good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if session.config.option.collectonly:  # reading baselines costs more than collecting
            return
        # Of a file that was asked for in part, only that part was collected.
        whole = set() if any("::" in arg for arg in session.config.args) else own.collected
        own.notes += unused_baselines(own.records, own.passed.values(), whole, own.options)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One section with the launches' durations where asked, every verdict, the totals, and what was written."""
        own = self.session
        if not any(record.num_launches or record.lacked_devices for record in own.records) and not own.notes:
            return
        terminalreporter.section("aorta")
        durations = durations_lines(own.records) if own.options.durations else []
        for line in [*durations, *summary_lines(own.records), *own.notes]:
            terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Take the terminal's part, unless this is a worker of xdist."""
    own = session.config.stash[SESSION]
    own.line = open_line(own.options.progress, session.config)
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Controller(own), "aorta-controller")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of xdist, tell the controller what was collected."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["aorta_collected"] = sorted(session.config.stash[SESSION].collected)
