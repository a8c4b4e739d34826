"""The record of a test for the summary: plain data that pytest sends with the test's report, even under xdist."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import pytest

from pytest_aorta.common.model import to_builtins
from pytest_aorta.session.history.entries import MeasuredLaunch
from pytest_aorta.verdict.learning import NewLaunches
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

# pytest-rerunfailures' word for the outcome of an attempt that is followed by another attempt.
RETRIED = "rerun"
_FAILED = ("failed", "error")


@dataclass(frozen=True)
class LaunchTimes:
    """Durations of a test's launch ``number``, in seconds: ``wall``, and the phases that are known."""

    number: int
    launcher: str
    times_s: dict[str, float]


@dataclass
class Compared:
    """One comparison: the folders of its launches, and the measured values.

    Attributes:
        case: The test's node id and the comparison's label.
        candidate, reference: Folders of the launches in order, each with a ``result.json``.
        baseline: File of the stored baseline, which may not exist; None for a comparison of two variants.
        measured: Metric -> median over the candidate's launches, including metrics that were not compared.
        platform, workload: Platform and workload of the candidate.
        launches: All launches of both sides in order, as the history keeps them.
    """

    case: str
    candidate: list[str] = field(default_factory=list)
    reference: list[str] = field(default_factory=list)
    baseline: str | None = None
    measured: dict[str, float | str] = field(default_factory=dict)
    platform: str = ""
    workload: str = ""
    launches: list[MeasuredLaunch] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Compared:
        """Build a comparison from the values of :func:`dataclasses.asdict`."""
        return cls(**data | {"launches": [MeasuredLaunch.from_json(launch) for launch in data["launches"]]})


@dataclass
class TestRecord:
    """One attempt of a test: its verdicts, launches to store, and durations of launches.

    Attributes:
        notes: Explanations of the verdicts.
        detection: Case -> lines on an interrupted recording, and on the changes that the new baseline detects.
        lacked_devices: The reason why the host has too few devices for the test; None if it has enough.
        outcome: pytest's word for the outcome.
        failure: The text of the failure.
        attempt: Number of the attempt, counted from 1.
        can_launch: Whether the test has a fixture that launches.
        traces: Notes on the files that a profiler left.
        num_failed_launches: Number of launches that left no valid result.
        platform: Platform of the test's world; empty if the test has no world.
    """

    __test__ = False

    nodeid: str
    verdicts: list[Verdict] = field(default_factory=list)
    new_launches: list[NewLaunches] = field(default_factory=list)
    used_cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    detection: dict[str, list[str]] = field(default_factory=dict)
    lacked_devices: str | None = None
    num_launches: int = 0
    launch_times: list[LaunchTimes] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    outcome: str = ""
    failure: str = ""
    attempt: int = 1
    can_launch: bool = False
    traces: list[str] = field(default_factory=list)
    num_failed_launches: int = 0
    platform: str = ""

    @property
    def is_retried(self) -> bool:
        """Return True if another attempt of the test followed and replaces this attempt."""
        return self.outcome == RETRIED

    @property
    def attempt_label(self) -> str:
        """Return `` (attempt N)`` for a test that ran more than once, else nothing."""
        return f" (attempt {self.attempt})" if self.attempt > 1 or self.is_retried else ""

    @property
    def has_failed(self) -> bool:
        """Return True if the test failed, or its setup or teardown."""
        return self.outcome in _FAILED

    @property
    def failed_before_launch(self) -> bool:
        """Return True if the test failed and launched nothing, e.g. because of an unknown workload."""
        return self.has_failed and not self.num_launches and (self.can_launch or self.lacked_devices is not None)

    @property
    def failed_without_verdict(self) -> bool:
        """Return True if the test launched something and failed before a comparison ended, e.g. by a rank's error."""
        return self.has_failed and bool(self.num_launches) and not self.verdicts

    @property
    def compared_nothing(self) -> bool:
        """Return True if the test launched something and did not fail, without a comparison or a new baseline."""
        return not self.has_failed and bool(self.num_launches) and not self.verdicts and not self.new_launches

    @property
    def is_skipped(self) -> bool:
        """Return True if the test was skipped because it lacked devices."""
        return self.lacked_devices is not None and not self.has_failed

    @property
    def is_reported(self) -> bool:
        """Return True if the test launched something, lacked devices, or failed before it could launch."""
        return bool(self.num_launches or self.lacked_devices or self.failed_before_launch)

    @property
    def is_undecided(self) -> bool:
        """Return True if a verdict of the test is inconclusive."""
        return any(verdict.outcome is Outcome.INCONCLUSIVE for verdict in self.verdicts)

    def note_end(self, report: pytest.TestReport, failure: str) -> None:
        """Note the end of a subtest, or of the setup, call or teardown. What ends later does not undo a failure."""
        if report.failed or not self.has_failed:
            self.outcome = outcome_of(report)
        self.failure = "\n".join(filter(None, [self.failure, failure]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "nodeid": self.nodeid,
            "verdicts": to_builtins(self.verdicts),
            "new_launches": to_builtins(self.new_launches),
            "used_cases": self.used_cases,
            "notes": self.notes,
            "detection": self.detection,
            "lacked_devices": self.lacked_devices,
            "num_launches": self.num_launches,
            "num_failed_launches": self.num_failed_launches,
            "launch_times": [asdict(times) for times in self.launch_times],
            "compared": [asdict(compared) for compared in self.compared],
            "outcome": self.outcome,
            "failure": self.failure,
            "attempt": self.attempt,
            "can_launch": self.can_launch,
            "traces": self.traces,
            "platform": self.platform,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TestRecord:
        """Build a record from the values of :meth:`to_json`."""
        return cls(
            nodeid=data["nodeid"],
            verdicts=msgspec.convert(data["verdicts"], list[Verdict]),
            new_launches=msgspec.convert(data["new_launches"], list[NewLaunches]),
            used_cases=data["used_cases"],
            notes=data["notes"],
            detection=data["detection"],
            lacked_devices=data["lacked_devices"],
            num_launches=data["num_launches"],
            num_failed_launches=data["num_failed_launches"],
            launch_times=[LaunchTimes(**times) for times in data["launch_times"]],
            compared=[Compared.from_json(compared) for compared in data["compared"]],
            outcome=data["outcome"],
            failure=data["failure"],
            attempt=data["attempt"],
            can_launch=data["can_launch"],
            traces=data["traces"],
            platform=data["platform"],
        )


def outcome_of(report: pytest.TestReport) -> str:
    """Return pytest's word for the outcome of a test."""
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.failed and report.when != "call" else report.outcome


def properties(record: TestRecord) -> list[tuple[str, object]]:
    """Return a test's JUnit properties: attempt, launches, verdicts as text, each measured metric with its verdict.

    If a test has several comparisons, each name contains the label of its comparison.
    """
    found: list[tuple[str, object]] = [("aorta.attempt", record.attempt)] if record.can_launch else []
    found += [("aorta.launches", record.num_launches)] if record.num_launches else []
    found += [(f"aorta.{row.metric}", str(row)) for row in record.verdicts]
    for compared in record.compared:
        label = compared.case.removeprefix(f"{record.nodeid}::")
        prefix = "aorta" if len(record.compared) == 1 else f"aorta.{label}"
        found += [(f"{prefix}.{metric}.value", value) for metric, value in compared.measured.items()]
        for row in record.verdicts:
            if row.case == compared.case:
                found.append((f"{prefix}.{row.metric}.verdict", row.label))
                if row.baseline is not None:
                    found.append((f"{prefix}.{row.metric}.baseline", row.baseline))
    return found
