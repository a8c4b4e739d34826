"""pytest's hooks. Each one delegates to another package.

pytest loads this module in every run of an environment that has pytest-aorta installed. Therefore packages that only
tests with a launch need are imported inside hooks, when the first such test needs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_aorta.common.errors import AortaError
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.profiler import check_profiler
from pytest_aorta.plan.world import check_budget
from pytest_aorta.plugin.markers import FIXTURE, MARKERS
from pytest_aorta.plugin.options import add_options, read_options
from pytest_aorta.plugin.run import Controller, Run, record_of

if TYPE_CHECKING:
    from pytest_aorta.session.record import TestRecord
    from pytest_aorta.session.runner import WorkloadRunner
    from pytest_aorta.session.spec import TestSpec
    from pytest_aorta.session.world import DistributedWorld


# Options of pytest that only show something. They work on a machine that lacks GPUs and profilers, too.
_SHOWING = ("collectonly", "showfixtures", "show_fixtures_per_test", "markers", "help", "cacheshow", "setupplan")
# Options of pytest with which no test is called, so that the run has no results.
_WITHOUT_RESULTS = (*_SHOWING, "setuponly")

RUN = pytest.StashKey[Run]()
NODE_ID = pytest.StashKey[str]()
# The markers that a test's world was made from.
SPEC: pytest.StashKey[TestSpec] = pytest.StashKey()
RECORD = pytest.StashKey["TestRecord"]()
# Whether the setup, the call or the teardown of a test is running.
IS_RUNNING = pytest.StashKey[bool]()
# The record as JSON, as the last report of the test carries it.
SENT = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options and ini keys, when the plugin is loaded."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check options and register markers, once the command line and the ini file are parsed."""
    for text in MARKERS.values():
        config.addinivalue_line("markers", text)
    try:
        options = read_options(config, command=_command(config))
        run = Run(replace(options, unfinished=_unfinished(config, options)))
        if run.options.report is not None:
            from pytest_aorta.report.write import require_packages  # only for a run with a report

            require_packages()
        if not _is_given(config, _SHOWING):
            if run.options.gpus is not None:
                check_budget(run.options, run.devices)
            check_profiler(run.options.profiler)
            if run.options.ab is not None:
                from pytest_aorta.plan.reference import check_reference  # only for a run with a reference

                check_reference(run.options.ab, run.options.rootdir)
    except AortaError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run


def _is_given(config: pytest.Config, names: Iterable[str]) -> bool:
    return any(config.getoption(name, False) for name in names)


def _command(config: pytest.Config) -> tuple[str, ...]:
    """Return the words of the command line; an xdist worker receives them from the controller."""
    if (given := getattr(config, "workerinput", {}).get("aorta_command")) is not None:
        return tuple(given)
    return ("pytest", *map(os.fspath, config.invocation_params.args))


def _unfinished(config: pytest.Config, options: Options) -> Path | None:
    """Return the folder in pytest's cache for recordings that are interrupted; None if there is no cache."""
    # Without the plugin cacheprovider, the attribute does not exist.
    cache = getattr(config, "cache", None)
    if cache is None or not options.update_baselines or _is_given(config, _WITHOUT_RESULTS):
        return None
    with suppress(OSError):  # an interrupted recording starts over if the cache can't be written
        return Path(cache.mkdir("aorta-recordings"))
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the command line to a worker of xdist, when the controller starts the worker."""
    node.workerinput["aorta_command"] = node.config.stash[RUN].options.command


def pytest_unconfigure(config: pytest.Config) -> None:
    """Release the resources of the run, before pytest ends."""
    if RUN in config.stash:
        config.stash[RUN].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return one line for pytest's header: devices, torch, platform, baselines; no line if tests are only collected."""
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
            # The node id is stored now, because xdist's loadgroup mode later appends the group to it.
            nodeid = item.stash[NODE_ID] = _full_id(item)
            try:
                _check_markers(item)
            except AortaError as error:
                problems[nodeid] = str(error)
            collector.config.stash[RUN].collected.add(nodeid)
    if problems:
        lines = [f"{nodeid}: {problem}" for nodeid, problem in problems.items()]
        report.outcome, report.longrepr, report.result = "failed", "\n".join(lines), []
        # pytest passes the call of any collection error to pytest_exception_interact, where editors read the error.
        vars(report)["call"] = pytest.CallInfo.from_call(lambda: _refuse(report.longrepr), "collect")
        # JSON text, because xdist transfers only plain values.
        vars(report)["aorta_problems"] = json.dumps(problems)
    if report.failed:
        collector.config.stash[RUN].incomplete.add(_file_id(collector))
    return report


def _full_id(item: pytest.Item) -> str:
    """Return the node id of a test, with the path of its file relative to pytest's root folder."""
    return "::".join([_file_id(item), *item.nodeid.split("::")[1:]])


def _file_id(node: pytest.Item | pytest.Collector) -> str:
    """Return the first part of a node id: the path of the file relative to pytest's root folder.

    For a file outside of the root folder, such as ``tests/test_a.py`` under ``-c ci/pytest.ini``, pytest's node id
    depends on the command line, and tests of several files can have the same one.
    """
    root = node.config.rootpath
    if node.path.is_relative_to(root):
        return node.nodeid.split("::")[0]
    return os.path.relpath(node.path.resolve(), root.resolve())


def _refuse(text: object) -> NoReturn:
    raise pytest.Collector.CollectError(text)


def _check_markers(item: pytest.Item) -> None:
    # The markers of other tests may belong to their suite. A test that requests the fixture by name is checked then.
    if FIXTURE in getattr(item, "fixturenames", ()):
        from pytest_aorta.plugin.read_markers import read_spec  # needs the table of metrics

        read_spec(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Give the test a new record each time pytest, or a plugin such as pytest-rerunfailures, runs the test.

    A test without a fixture that launches gets its record when it asks for such a fixture by name.
    """
    __tracebackhide__ = True
    if FIXTURE in getattr(item, "fixturenames", ()):
        _add_record(item, can_launch=True)
    elif RECORD in item.stash:
        _add_record(item, can_launch=False)
    return (yield from _running(item))


def _add_record(item: pytest.Item, *, can_launch: bool) -> None:
    from pytest_aorta.session.record import TestRecord  # only tests with a launch need it

    former = item.stash.get(RECORD, None)
    # pytest-rerunfailures counts attempts across all xdist workers.
    attempt = getattr(item, "execution_count", former.attempt + 1 if former else 1)
    item.stash[RECORD] = TestRecord(item.stash[NODE_ID], attempt=attempt, can_launch=can_launch)
    item.stash[SENT] = ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note that the test is running, while pytest calls its function."""
    __tracebackhide__ = True
    return (yield from _running(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Note that the test is running, while pytest tears its fixtures down."""
    __tracebackhide__ = True
    return (yield from _running(item))


def _running(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    item.stash[IS_RUNNING] = True
    try:
        return (yield)
    finally:
        item.stash[IS_RUNNING] = False


@pytest.fixture
def distributed_world(request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
    """The ranks that the test may start, as its ``world`` marker asks; skips the test if devices are missing."""
    __tracebackhide__ = True
    from pytest_aorta.plugin.fixtures import make_spec, make_world  # only tests with a launch need them

    stash = request.node.stash
    if RECORD not in stash:
        _add_record(request.node, can_launch=False)
    stash[SPEC] = make_spec(request.node)
    yield from make_world(request, request.config.stash[RUN].session, stash[SPEC], stash[RECORD])


@pytest.fixture
def workload(request: pytest.FixtureRequest, distributed_world: DistributedWorld) -> WorkloadRunner:
    """Runs workloads on ``distributed_world`` and compares their results."""
    run, stash = request.config.stash[RUN], request.node.stash
    return run.session.runner(distributed_world, run.options, stash[SPEC], stash[RECORD])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the test's record to its report, which xdist sends to the controller.

    The reports of subtests carry no record, because the record of a test is one for all its subtests.
    """
    report = yield
    # A test is reported when its call has ended, and a subtest before.
    is_subtest = item.stash.get(IS_RUNNING, False)
    if not is_subtest and NODE_ID in item.stash:
        vars(report)["aorta_nodeid"] = item.stash[NODE_ID]
    record = item.stash.get(RECORD, None)
    if record is None:
        return report
    is_end = not is_subtest and (report.when == "call" or (report.when == "setup" and not report.passed))
    if is_end or report.failed:
        record.note_end(report, _failure_text(report, call))
    if not is_subtest:
        _attach(item, report, record, is_end=is_end)
        if report.when == "teardown":
            _drop_unfinished(item, record)
    return report


def _drop_unfinished(item: pytest.Item, record: TestRecord) -> None:
    """Remove the launches that were kept in case the test was interrupted; its report contains them now."""
    for launches in record.new_launches:
        from pytest_aorta.session.baselines import drop_unfinished  # only for a test that records

        drop_unfinished(item.config.stash[RUN].options, launches.baseline)


def _failure_text(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.passed or call.excinfo is None:
        return ""
    # The message of an AortaError is complete; for any other error the traceback helps.
    return str(call.excinfo.value) if isinstance(call.excinfo.value, AortaError) else report.longreprtext


def _attach(item: pytest.Item, report: pytest.TestReport, record: TestRecord, *, is_end: bool) -> None:
    """Attach the record to the report that ends the test, and to that of a teardown unless the record was sent before.

    A teardown can change the record. The attempts of plugins such as pytest-retry have no report of their own.
    """
    from pytest_aorta.session.record import properties  # not needed to collect tests

    # JSON text, because xdist transfers only plain values.
    text = json.dumps(record.to_json())
    if not is_end and (report.when != "teardown" or text == item.stash[SENT]):
        return
    others = [entry for entry in item.user_properties if not entry[0].startswith("aorta.")]
    item.user_properties[:] = others + properties(record)
    report.user_properties = list(item.user_properties)
    vars(report)["aorta"] = item.stash[SENT] = text


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(
    report: pytest.CollectReport | pytest.TestReport,
) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Give a test that passed without a decision a letter and a count of its own: neither skipped nor passed."""
    if report.when != "call" or not report.passed or hasattr(report, "wasxfail"):
        return None
    record = record_of(report)
    if record is None or not record.is_undecided or record.has_failed:  # by a subtest
        return None
    return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Open the progress line and, in the process that owns the terminal, register the controller's hooks.

    A worker of xdist and a run in which no test is called have no results to write. The Markdown of an earlier run is
    removed, so that it can't be taken for that of this run if the process is killed.
    """
    if _is_given(session.config, _WITHOUT_RESULTS):
        return
    from pytest_aorta.plugin.progress_line import open_line

    run = session.config.stash[RUN]
    run.line = open_line(session.config)
    if hasattr(session.config, "workerinput"):
        return
    session.config.pluginmanager.register(Controller(run), "aorta-controller")
    if run.options.markdown is not None:
        with suppress(OSError):  # reported when the file is written
            run.options.markdown.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the node ids that a worker of xdist has collected to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["aorta_collected"] = sorted(session.config.stash[RUN].completely_collected)
