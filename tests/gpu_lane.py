"""The lane of ``./dev gpu``: failed tests first, then those of few GPUs and short ones; the next call goes on.

The junit files of earlier calls, in one folder, say how each test ended and how long it took. A call with a time limit
does not start a test that would not end in time, and runs no test again that passed, until every test has a result.

Each worker of pytest-xdist leases all GPUs to itself, since bits do not depend on who else uses them, and most of a
launch is imports and compilation. Beside a test that is marked ``timed``, no other one runs.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from pytest_aorta.common import variables
from pytest_aorta.plan.accelerators import show_devices, visible_devices

LEFT = "left to the next call"
# A test that has never run is taken to last so long.
UNKNOWN_S = 30.0
# The exit code of a call that has left tests to the next one, where none failed.
IS_LEFT = 3


class Ended(NamedTuple):
    """The last end of a test: ``passed``, or the name of junit's element, such as ``failure``."""

    how: str
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lane")
    group.addoption("--lane", type=Path, required=True, help="folder with the junit files of earlier calls")
    group.addoption("--lane-until", type=float, default=math.inf, help="end of this call, in seconds since 1970")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.option.lane
    config.pluginmanager.register(Lane(ends_of(folder), config.option.lane_until, folder / "timed.lock"))
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        leases = tempfile.TemporaryDirectory(prefix=f"aorta-{worker}-")
        config.add_cleanup(leases.cleanup)
        os.environ[variables.LEASE_DIR] = leases.name
        if devices := visible_devices():
            # Tests of one GPU take the first.
            first = int(worker.removeprefix("gw")) % len(devices)
            show_devices(devices[first:] + devices[:first], os.environ)


def ends_of(folder: Path) -> dict[str, Ended]:
    """Return the last end of each test by its name in junit files, whose names sort by age."""
    found = {}
    for path in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            how = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            if not any(LEFT in child.get("message", "") for child in case):
                found[f"{case.get('classname')}.{case.get('name')}"] = Ended(how, float(case.get("time", 0)))
    return found


def _num_gpus(item: pytest.Item) -> float:
    """Return how many GPUs a test asks for; infinite if it asks for all, or runs pytest, which may."""
    marker = item.get_closest_marker("world")
    size = marker.kwargs.get("size") if marker else None
    return size if isinstance(size, int) else math.inf


def _is_timed(item: pytest.Item) -> bool:
    return item.get_closest_marker("timed") is not None


class Lane:
    """The order of the tests, and the time that is left."""

    def __init__(self, ends: dict[str, Ended], until_s: float, lock: Path) -> None:
        self._ends, self._until_s = ends, until_s
        self._num_left = 0
        self._lock = lock

    def _end(self, item: pytest.Item) -> Ended | None:
        path, _, name = item.nodeid.partition("::")
        return self._ends.get(f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}")

    def _seconds(self, item: pytest.Item) -> float:
        return end.seconds if (end := self._end(item)) else UNKNOWN_S

    def _has_failed(self, item: pytest.Item) -> bool:
        return (end := self._end(item)) is not None and end.how in ("failure", "error")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Sort the tests, and go on where the last call with a time limit has ended."""
        ends = list(map(self._end, items))
        if self._until_s < math.inf and None in ends:
            passed = [item for item, end in zip(items, ends, strict=True) if end and end.how == "passed"]
            config.hook.pytest_deselected(items=passed)
            items[:] = [item for item in items if item not in passed]
        # Timed tests come last: each waits until no other one runs, and those behind it wait too.
        items.sort(key=lambda item: (not self._has_failed(item), _is_timed(item), _num_gpus(item), self._seconds(item)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run timed tests alone."""
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX if _is_timed(item) else fcntl.LOCK_SH)
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave a test to the next call that would not end in time."""
        left_s, needed_s = self._until_s - time.time(), self._seconds(item)
        if needed_s > left_s:
            pytest.skip(f"{LEFT}: needs {needed_s:.0f} s, and {left_s:.0f} s are left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the tests that are left."""
        self._num_left += report.skipped and LEFT in report.longreprtext

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Do not end as a success with tests left."""
        if self._num_left and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = IS_LEFT

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what to do about tests that are left."""
        if self._num_left:
            terminalreporter.write_line(f"{self._num_left} tests are {LEFT}: run the same command again")
