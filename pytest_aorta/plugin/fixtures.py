"""The tests that launch, in each process that runs them: their fixtures, and the records on their reports.

Fixtures return handles, so every failed launch is raised in the test body.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Generator, Iterator, Sequence
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import AortaError, DevicesUnavailable, SpecError, hide_frames
from pytest_aorta.common.files import slug
from pytest_aorta.plan.options import Options
from pytest_aorta.plan.world import resolve_world
from pytest_aorta.plugin.markers import FIXTURE, check_unchanged, read_spec
from pytest_aorta.plugin.run import Run, record_of
from pytest_aorta.session.baselines import drop_unfinished
from pytest_aorta.session.record import TestRecord, properties
from pytest_aorta.session.runner import WorkloadRunner
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import METRICS, MetricKind

# The node id at collection, with the path of the file relative to pytest's root folder.
NODE_ID = pytest.StashKey[str]()
# The markers that a test's world was made from.
SPEC = pytest.StashKey[TestSpec]()
RECORD = pytest.StashKey[TestRecord]()
# The record as JSON, as the last report of the test carries it.
SENT = pytest.StashKey[str]()


class LaunchingTests:
    """The hooks and fixtures of tests that launch, registered when the first such test is found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.hiding: set[pytest.Item] = set()

    def collect(self, items: Sequence[pytest.Item], hiding: Sequence[pytest.Item]) -> None:
        """Keep the node ids of collected tests, and those tests whose fixture ``workload`` hides that of this plugin.

        The node id is kept now, because xdist's loadgroup mode later appends the group to it.
        """
        for item in items:
            item.stash[NODE_ID] = full_id(item)
            self.run.collected.add(item.stash[NODE_ID])
        self.hiding |= set(hiding)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the node ids that a worker of xdist has collected to the controller."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["aorta_collected"] = sorted(self.run.collected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give the test a new record each time pytest, or a plugin such as pytest-rerunfailures, runs the test.

        A test without a fixture that launches gets its record when it asks for such a fixture by name.
        """
        can_launch = FIXTURE in getattr(item, "fixturenames", ())
        if can_launch or RECORD in item.stash:
            _add_record(item, can_launch=can_launch)
        if item in self.hiding:
            text = "a fixture named workload hides that of pytest-aorta: this test launches and compares nothing, "
            item.warn(pytest.PytestWarning(text + "and its markers are not checked; rename the fixture"))

    def world(self, request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
        """Yield the world of a test and release its lease at the end.

        Skips or fails the test if devices are missing.
        """
        __tracebackhide__ = True
        item = request.node
        if RECORD not in item.stash:
            _add_record(item, can_launch=False)
        try:
            # Hooks and other fixtures may have added markers since collection.
            spec = item.stash[SPEC] = read_spec(item)
        except SpecError as error:
            hide_frames(error)
            raise
        options, session, record = self.run.options, self.run.session, item.stash[RECORD]
        session.line = self.run.line
        base = options.results_dir or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
        timed = spec.measures_overlap or any(METRICS[name].kind is MetricKind.TIMING for name in spec.tolerances)
        # Outside of the try: a driver that does not answer is an error, not a reason to skip the test.
        devices = session.devices
        try:
            world = resolve_world(spec.world, options, devices)
        except DevicesUnavailable as error:
            _refuse(record, options, str(error))
        record.platform = world.platform
        with session.leased(world, spec, record, base / slug(record.nodeid), timed=timed) as leased:
            leased.lack_devices = functools.partial(_refuse, record, options)
            leased.check_markers = functools.partial(check_unchanged, item, spec)
            yield leased

    def runner(self, request: pytest.FixtureRequest, world: DistributedWorld) -> WorkloadRunner:
        """Return the object that runs workloads on a test's world."""
        stash = request.node.stash
        return self.run.session.runner(world, self.run.options, stash[SPEC], stash[RECORD])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the test's record to its report, which xdist sends to the controller.

        A subtest's report carries the record so far, which nobody reads: see :func:`record_of`.
        """
        report = yield
        if NODE_ID in item.stash:
            vars(report)["aorta_nodeid"] = item.stash[NODE_ID]
        record = item.stash.get(RECORD, None)
        if record is None:
            return report
        is_end = report.when == "call" or (report.when == "setup" and not report.passed)
        if is_end or report.failed:
            record.note_end(report, _failure_text(report, call))
        # A teardown can change the record. The attempts of plugins such as pytest-retry have no report of their own.
        text = json.dumps(record.to_json())  # xdist transfers only plain values
        if is_end or (report.when == "teardown" and text != item.stash[SENT]):
            others = [entry for entry in item.user_properties if not entry[0].startswith("aorta.")]
            item.user_properties[:] = others + properties(record)
            report.user_properties = list(item.user_properties)
            vars(report)["aorta"] = item.stash[SENT] = text
        if report.when == "teardown":
            for launches in record.new_launches:  # kept in case the test was interrupted; its report contains them now
                drop_unfinished(self.run.options, launches.baseline)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Give a test that passed without a decision a letter and a count of its own: neither skipped nor passed."""
        if report.when != "call" or not report.passed or hasattr(report, "wasxfail"):
            return None
        record = record_of(report)
        if record is None or not record.is_undecided or record.has_failed:  # by a subtest
            return None
        return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})


def full_id(item: pytest.Item) -> str:
    """Return the node id of a test, with the path of its file relative to pytest's root folder.

    For a file outside of the root folder, such as ``tests/test_a.py`` under ``-c ci/pytest.ini``, pytest's node id
    depends on the command line, and tests of several files can have the same one.
    """
    file, *names = item.nodeid.split("::")
    root = item.config.rootpath
    if not item.path.is_relative_to(root):
        file = os.path.relpath(item.path.resolve(), root.resolve())
    return "::".join([file, *names])


def _add_record(item: pytest.Item, *, can_launch: bool) -> None:
    former = item.stash.get(RECORD, None)
    # pytest-rerunfailures counts attempts across all xdist workers.
    attempt = getattr(item, "execution_count", former.attempt + 1 if former else 1)
    nodeid = item.stash.setdefault(NODE_ID, full_id(item))
    item.stash[RECORD] = TestRecord(nodeid, attempt=attempt, can_launch=can_launch)
    item.stash[SENT] = ""


def _failure_text(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.passed or call.excinfo is None:
        return ""
    # The message of an AortaError is complete; for any other error the traceback helps.
    return str(call.excinfo.value) if isinstance(call.excinfo.value, AortaError) else report.longreprtext


def _refuse(record: TestRecord, options: Options, reason: str) -> NoReturn:
    record.lacked_devices = reason
    if options.require_gpus:
        raise pytest.fail.Exception(f"--aorta-require-gpus: {reason}", pytrace=False) from None
    pytest.skip(reason)
