"""The tests that launch, in each process that runs them: their fixtures, and the records on their reports.

Fixtures return handles, so every failed launch is raised in the test body.
"""

import os
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import (
    AortaError,
    ComparisonFailed,
    DevicesUnavailable,
    NothingCompared,
    SpecError,
    drop_frames,
)
from pytest_aorta.common.files import slug
from pytest_aorta.common.model import to_text
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import Options, WithoutGpus
from pytest_aorta.plan.world import resolve_world
from pytest_aorta.plugin.markers import can_launch, check_unchanged, read_spec
from pytest_aorta.plugin.run import Run, record_of
from pytest_aorta.session.record import RunningTest, properties
from pytest_aorta.session.session import TestSpec
from pytest_aorta.session.world import DistributedWorld
from pytest_aorta.verdict.metrics import MetricKind, metric_of

# The node id at collection, with the path of the file relative to pytest's root folder.
NODE_ID = pytest.StashKey[str]()
TEST = pytest.StashKey["LaunchingTest"]()
# The record as JSON, as the last report of the test carries it.
SENT = pytest.StashKey[str]()


class LaunchingTest(RunningTest):
    """A test of pytest while it runs; ``spec`` is read from its markers when its fixtures are set up."""

    spec: TestSpec

    def __init__(self, item: pytest.Item, options: Options) -> None:
        former = item.stash.get(TEST, None)
        # pytest-rerunfailures counts attempts across all xdist workers.
        attempt = getattr(item, "execution_count", former.record.attempt + 1 if former else 1)
        super().__init__(item.stash.setdefault(NODE_ID, _full_id(item)), attempt, can_launch=can_launch(item))
        self._item = item
        self._options = options

    def check(self) -> None:
        """Raise SpecError if the test's markers have changed since its world was made."""
        check_unchanged(self._item, self.spec)

    def planned(self, plan: LaunchPlan) -> None:
        """Call the hook of a launch."""
        self._item.ihook.pytest_aorta_launch(plan=plan)

    def lacks(self, reason: str) -> NoReturn:
        """Skip the test, or fail it under ``--aorta-without-gpus=fail``."""
        self.record = self.record.replace(lacked_devices=reason)
        if self._options.without_gpus == WithoutGpus.FAIL:
            raise pytest.fail.Exception(f"--aorta-without-gpus=fail: {reason}", pytrace=False) from None
        pytest.skip(reason)


class LaunchingTests:
    """The hooks and fixtures of tests that launch, registered when the first such test is found."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def collect(self, items: Sequence[pytest.Item]) -> None:
        """Keep the node ids of collected tests now, because xdist's loadgroup mode later appends the group to them."""
        for item in items:
            item.stash[NODE_ID] = _full_id(item)
            self.run.collected.add(item.stash[NODE_ID])

    def pytest_report_collectionfinish(self, config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
        """Return one line about devices, torch, platform and baselines if a test can launch."""
        launching = [*filter(can_launch, items)]
        if not launching or config.option.verbose < 0 or config.option.collectonly:
            return []
        try:
            return [header(self.run.options, self.run.session.devices, self._platforms(launching))]
        except AortaError as error:  # each test that needs devices fails with this error
            return [f"aorta: {error}"]

    def _platforms(self, items: Sequence[pytest.Item]) -> set[str]:
        """Return the platforms that tests ask for; a test with a wrong marker or without its devices has none."""
        found = set()
        for item in items:
            with suppress(SpecError, DevicesUnavailable):
                found.add(resolve_world(read_spec(item).world, self.run.options, self.run.session.devices).platform)
        return found

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
        if can_launch(item) or TEST in item.stash:
            self._add_test(item)

    def _add_test(self, item: pytest.Item) -> None:
        item.stash[TEST] = LaunchingTest(item, self.run.options)
        item.stash[SENT] = ""

    def world(self, request: pytest.FixtureRequest) -> Iterator[DistributedWorld]:
        """Yield the world of a test and release its lease at the end.

        Skips or fails the test if devices are missing.
        """
        __tracebackhide__ = True
        item = request.node
        if TEST not in item.stash:
            self._add_test(item)
        test = item.stash[TEST]
        # Hooks and other fixtures may have added markers since collection.
        spec = test.spec = read_spec(item)
        options, session = self.run.options, self.run.session
        base = options.results or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
        timed = spec.measures_overlap or any(metric_of(name).kind is MetricKind.TIMING for name in spec.tolerances)
        # Outside of the try: a driver that does not answer is an error, not a reason to skip the test.
        devices = session.devices
        try:
            world = resolve_world(spec.world, options, devices)
        except DevicesUnavailable as error:
            test.lacks(str(error))
        timed = timed and not world.simulated
        with session.launcher(world, spec, test, base / slug(test.record.nodeid), timed=timed) as launcher:
            yield DistributedWorld(launcher)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the test's record to its report, which xdist sends to the controller.

        A subtest's report carries the record so far, which nobody reads: see :func:`record_of`.
        """
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, AortaError) and not item.config.getoption("fulltrace", False):
            drop_frames(error)
        report = yield
        if isinstance(error, ComparisonFailed | NothingCompared):
            _begin_with_verdict(report, error)
        if NODE_ID in item.stash:
            vars(report)["aorta_nodeid"] = item.stash[NODE_ID]
        test = item.stash.get(TEST, None)
        if test is None:
            return report
        is_end = report.when == "call" or (report.when == "setup" and not report.passed)
        if is_end or report.failed:
            test.ended(report, _failure_text(report, call))
        # A teardown can change the record. The attempts of plugins such as pytest-retry have no report of their own.
        text = to_text(test.record)  # xdist transfers only plain values
        if is_end or (report.when == "teardown" and text != item.stash[SENT]):
            others = [entry for entry in item.user_properties if not entry[0].startswith("aorta.")]
            item.user_properties[:] = others + properties(test.record)
            report.user_properties = list(item.user_properties)
            vars(report)["aorta"] = item.stash[SENT] = text
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


def _full_id(item: pytest.Item) -> str:
    """Return the node id of a test, with the path of its file relative to pytest's root folder.

    For a file outside of the root folder, such as ``tests/test_a.py`` under ``-c ci/pytest.ini``, pytest's node id
    depends on the command line, and tests of several files can have the same one.
    """
    file, *names = item.nodeid.split("::")
    root = item.config.rootpath
    if not item.path.is_relative_to(root):
        file = os.path.relpath(item.path.resolve(), root.resolve())
    return "::".join([file, *names])


def _begin_with_verdict(report: pytest.TestReport, error: AortaError) -> None:
    """Leave the name of the error's type out of a report: the first line and the short summary show the verdict."""
    name = f"{type(error).__module__}.{type(error).__qualname__}: "
    if (crash := getattr(report.longrepr, "reprcrash", None)) is not None:
        crash.message = crash.message.removeprefix(name)
        for entry in report.longrepr.reprtraceback.reprentries:  # type: ignore[union-attr]
            entry.lines = [line.replace(name, "", 1) for line in entry.lines]


def _failure_text(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.passed or call.excinfo is None:
        return ""
    # The message of an AortaError is complete; for any other error the traceback helps, after what is wrong.
    if isinstance(call.excinfo.value, AortaError):
        return str(call.excinfo.value)
    return f"{call.excinfo.exconly().splitlines()[0]}\n{report.longreprtext}"


def header(options: Options, devices: Sequence[Device], platforms: Collection[str]) -> str:
    """Return the devices, torch, platforms of tests and baselines of this run in one line."""
    used = devices[: options.gpus]
    models = sorted({device.model for device in used})
    where = f"{len(used)} x {' + '.join(models)}" if used else "no GPU" if options.gpus else "no GPU (CPU ranks)"
    if len(used) < (options.gpus or 0):
        where += f" of {options.gpus} (--aorta-gpus)"
    if options.without_gpus == WithoutGpus.SIMULATE:
        where += ", missing GPUs simulated"
    if options.nnodes > 1:
        where += f" on each of {options.nnodes} nodes"
    folder = str(options.baselines).removeprefix(f"{options.rootdir}/")
    shown = f", platform {' and '.join(sorted(platforms))}" if platforms else ""
    return f"aorta: {where}, torch {_torch_version()}{shown}, baselines {folder}"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
