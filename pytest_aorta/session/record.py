"""Records of a test: its launches and comparisons while it runs, then one frozen record.

pytest sends the record with the test's report, even under xdist. The summary, the Markdown, JUnit's properties, the
page and the history are functions of records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NoReturn

import pytest

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.common.model import Model
from pytest_aorta.common.text import brief, counted, duration
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.diagnosis import LaunchFailure
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.learning import NewBaseline
from pytest_aorta.verdict.metrics import Origin, measured_values
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import DIFFERS, FINDINGS, Decided, Note, NoteKind, Reason, ReferenceKind, Verdict

# pytest-rerunfailures' word for the outcome of an attempt that is followed by another attempt.
RETRIED = "rerun"
_FAILED = ("failed", "error")


class Side(StrEnum):
    """A side of a comparison."""

    CANDIDATE = "candidate"
    REFERENCE = "reference"


class ComparedLaunch(Model, frozen=True):
    """A launch of a comparison.

    Attributes:
        side: The side that was launched.
        facts: The measurements and the provenance.
        folder: Run folder with the ``result.json``; empty for a result of another test.
    """

    side: Side
    facts: LaunchFacts
    folder: str = ""


class Comparison(Model, frozen=True):
    """One comparison of a test, as far as it came.

    Attributes:
        case: The test's node id and the comparison's label.
        kind: What the candidate is compared with.
        platform, workload: Platform and workload of the candidate.
        launches: The launches of both sides, in order.
        rows: One verdict per compared metric; empty if a baseline was recorded, or a launch failed.
        notes: Explanations of the verdicts.
        suspect: The rank that explains a slower step; None if no rank does.
        baseline: File of the stored baseline, which may not exist; empty for a comparison of two variants.
        new: The baseline to store if the test passes.
        failing: The metrics whose verdicts were raised as ``ComparisonFailed``; empty if none was.
    """

    case: str
    kind: ReferenceKind = ReferenceKind.BASELINE
    platform: str = ""
    workload: str = ""
    launches: tuple[ComparedLaunch, ...] = ()
    rows: tuple[Verdict, ...] = ()
    notes: tuple[Note, ...] = ()
    suspect: int | None = None
    baseline: str = ""
    new: NewBaseline | None = None
    failing: tuple[str, ...] = ()

    def facts(self, side: Side) -> list[LaunchFacts]:
        """Return the facts of one side's launches, in order."""
        return [launch.facts for launch in self.launches if launch.side is side]

    @property
    def compared_nothing(self) -> bool:
        """Return True if no metric was compared, and not because of a profiler, which the user asked for.

        That speed has not changed by a factor of two does not make a test.
        """
        asked = [row for row in self.rows if row.tolerance.origin is not Origin.GROSS]
        return all(row.not_applicable not in (None, Reason.PROFILER) for row in asked)

    @property
    def measured(self) -> dict[str, float | str]:
        """Return metric -> median over the candidate's launches, including metrics that were not compared."""
        launches = self.facts(Side.CANDIDATE)
        return measured_values(launches) if launches else {}


class LaunchNote(Model, frozen=True):
    """A launch of a test.

    Attributes:
        wall_s: Duration in seconds; 0 if the launch did not end.
        has_result: Whether the launch left a valid result.
        traces: Notes on the files that a profiler left.
        folder: The run folder; empty if the launch did not end.
        failure: The diagnosis of a launch that failed.
        measures: Whether a result can be compared; the values of a function are the test's own.
    """

    wall_s: float = 0.0
    has_result: bool = False
    traces: tuple[str, ...] = ()
    folder: str = ""
    failure: LaunchFailure | None = None
    measures: bool = True


class TestRecord(Model, frozen=True):
    """One attempt of a test.

    Attributes:
        attempt: Number of the attempt, counted from 1.
        outcome: pytest's word for the outcome.
        failure: The text of the failure.
        comparisons: The comparisons, in order.
        launches: All launches, in order.
        lacked_devices: The reason why the host has too few devices for the test; None if it has enough.
        can_launch: Whether the test has a fixture that launches.
        platform: Platform of the test's world; empty if the test has no world.
        line: Line of the file at which the test begins; 0 if unknown.
    """

    __test__ = False

    nodeid: str
    attempt: int = 1
    outcome: str = ""
    failure: str = ""
    comparisons: tuple[Comparison, ...] = ()
    launches: tuple[LaunchNote, ...] = ()
    lacked_devices: str | None = None
    can_launch: bool = False
    platform: str = ""
    line: int = 0

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdicts of all comparisons."""
        return [row for comparison in self.comparisons for row in comparison.rows]

    @property
    def edits(self) -> list[str]:
        """Return the sentences on what was edited, of the comparisons that failed."""
        return [
            note.text for one in self.comparisons if one.failing for note in one.notes if note.kind is NoteKind.EDIT
        ]

    @property
    def reason(self) -> str:
        """Return why the test failed: what was edited, with the metrics that show it, or the failure's first line."""
        metrics = ", ".join(metric for one in self.comparisons for metric in one.failing)
        return f"{'; '.join(self.edits)} ({metrics})" if self.edits else next(iter(self.failure.splitlines()), "")

    @property
    def unshown_notes(self) -> list[Note]:
        """Return the notes that the failure does not contain; pytest prints no failure of a retried attempt."""
        # A comparison without a verdict that has notes has failed for lack of anything to compare.
        unshown = (one for one in self.comparisons if not (self.has_failed and (one.failing or not one.rows)))
        return [note for one in unshown for note in one.notes]

    @property
    def unshown_findings(self) -> list[list[Verdict]]:
        """Return the findings, grouped as in :func:`_finding_groups`, that the failure does not contain."""
        shown = {(one.case, metric) for one in self.comparisons for metric in one.failing if self.has_failed}
        return [rows for rows in _finding_groups(self) if shown.isdisjoint((row.case, row.metric) for row in rows)]

    @property
    def traces(self) -> list[str]:
        """Return the notes on the files that a profiler left."""
        return [note for launch in self.launches for note in launch.traces]

    def label_of(self, comparison: Comparison) -> str:
        """Return the label of one of the test's comparisons."""
        return comparison.case.removeprefix(f"{self.nodeid}::")

    @property
    def num_failed_launches(self) -> int:
        """Return the number of launches that left no valid result."""
        return sum(not launch.has_result for launch in self.launches)

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
        return self.has_failed and not self.launches and (self.can_launch or self.lacked_devices is not None)

    @property
    def compared_nothing(self) -> bool:
        """Return True if the test measured something and did not fail, without a comparison or a new baseline."""
        has_compared = any(comparison.rows or comparison.new for comparison in self.comparisons)
        return not self.has_failed and any(launch.measures for launch in self.launches) and not has_compared

    @property
    def is_reported(self) -> bool:
        """Return True if the test launched something, lacked devices, or failed before it could launch."""
        return bool(self.launches or self.lacked_devices or self.failed_before_launch)

    @property
    def is_undecided(self) -> bool:
        """Return True if a verdict of the test is inconclusive."""
        return any(verdict.outcome is Outcome.INCONCLUSIVE for verdict in self.verdicts)


class RunningTest:
    """A test while it runs: launches and comparisons are added, and hooks of its owner are called.

    pytest's plugin has a subclass whose methods check markers, skip the test and call pytest's hooks. For the command
    ``aorta``, a run stands for a test.

    Attributes:
        record: The record of the test as it is now.
    """

    def __init__(self, nodeid: str, attempt: int = 1, *, can_launch: bool = False) -> None:
        self.record = TestRecord(nodeid, attempt, can_launch=can_launch)

    def check(self) -> None:
        """Raise an error if the test may not launch or compare any more."""

    def planned(self, plan: LaunchPlan) -> None:
        """Take note of a launch before it starts."""

    def launched(self, note: LaunchNote) -> None:
        """Add a launch that has ended."""
        self.record = self.record.replace(launches=(*self.record.launches, note))

    def compared(self, comparison: Comparison) -> None:
        """Add a comparison, which is final."""
        self.record = self.record.replace(comparisons=(*self.record.comparisons, comparison))

    def lacks(self, reason: str) -> NoReturn:
        """End the test because the host has too few devices."""
        raise DevicesUnavailable(reason)

    def ended(self, report: pytest.TestReport, failure: str) -> None:
        """Note the end of a subtest, or of the setup, call or teardown. What ends later does not undo a failure."""
        before = self.record
        outcome = outcome_of(report) if report.failed or not before.has_failed else before.outcome
        failure = "\n".join(filter(None, [before.failure, failure]))
        line = (report.location[1] or 0) + 1
        self.record = before.replace(outcome=outcome, failure=failure, line=line)
        if outcome == "passed":
            self.record = self.record.replace(comparisons=tuple(map(_caught, before.comparisons)))


def _caught(comparison: Comparison) -> Comparison:
    """Return a comparison of a test that passed; if it raised an error, the test has caught that regression."""
    if not comparison.failing:
        return comparison
    caught = Decided(Outcome.REGRESSION, is_expected=True)
    rows = (row.replace(state=caught) if row.outcome is Outcome.REGRESSION else row for row in comparison.rows)
    return comparison.replace(rows=tuple(rows))


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
    found += [("aorta.launches", len(record.launches))] if record.launches else []
    found += [(f"aorta.{row.metric}", str(row)) for row in record.verdicts]
    for comparison in record.comparisons:
        prefix = "aorta" if len(record.comparisons) == 1 else f"aorta.{record.label_of(comparison)}"
        found += [(f"{prefix}.{metric}.value", value) for metric, value in comparison.measured.items()]
        for row in comparison.rows:
            found.append((f"{prefix}.{row.metric}.verdict", row.label))
            if row.baseline is not None:
                found.append((f"{prefix}.{row.metric}.baseline", row.baseline))
    return found


def _finding_groups(record: TestRecord) -> list[list[Verdict]]:
    """Return the findings of a test in order; metrics of one comparison that lack a baseline form one group."""
    groups: dict[object, list[Verdict]] = {}
    for number, row in enumerate(record.verdicts):
        if row.is_finding:
            groups.setdefault((row.case, row.reason) if row.remedy else number, []).append(row)
    return list(groups.values())


def finding_text(rows: Sequence[Verdict]) -> str:
    """Return one line on a group of findings."""
    first = rows[0]
    return str(first) if len(rows) == 1 else f"{first.label.capitalize()}: {len(rows)} metrics, {first.reason}"


def totals(records: Sequence[TestRecord], *, is_short: bool = False) -> str:
    """Return one line on a run: tests that launched, findings, unchanged metrics, what was not compared, launches.

    Counts that are 0 are left out. For a retried attempt, only the attempt and its launches count. A short line has no
    reasons but those that differ from the other side.
    """
    final = [record for record in records if not record.is_retried]
    rows = [row for record in final for row in record.verdicts]
    # A line of its own says that speed was not compared.
    rows = [row for row in rows if row.tolerance.origin is not Origin.GROSS or not row.not_applicable]
    found = Counter(row.outcome for row in rows if row.is_finding)
    launches = [launch for record in records for launch in record.launches]
    launched = [record for record in final if record.launches]
    failed = sum(record.has_failed for record in launched)
    is_ok = not found and not any(record.compared_nothing for record in launched)
    tests = counted(len(launched), "test")
    parts = [f"{failed} of {tests} failed" if failed else f"{tests} OK" if is_ok else tests]
    if found[Outcome.REGRESSION]:
        parts.append(counted(found.pop(Outcome.REGRESSION), "regression"))
    parts += [f"{found[outcome]} {outcome}" for outcome in FINDINGS if found[outcome]]
    if rows:
        num_within = sum(row.is_within_limit for row in rows)
        equal = sum(row.outcome is Outcome.PASS for row in rows) - num_within
        parts.append(f"{counted(equal, 'metric')} unchanged")
        parts += [f"{num_within} within {'its limit' if num_within == 1 else 'their limits'}"] if num_within else []
    if absent := [row for row in rows if row.outcome is Outcome.NOT_APPLICABLE]:
        elsewhere = [row for row in absent if row.not_applicable in DIFFERS]
        names = brief(", ".join(dict.fromkeys(row.metric for row in elsewhere)), 40)
        reasons = [f"{names}: {brief(elsewhere[0].detail, 80)}"] if elsewhere else []
        reasons += [] if is_short else dict.fromkeys(str(row.not_applicable) for row in absent if row not in elsewhere)
        parts.append(f"{len(absent)} not compared" + (f" ({', '.join(reasons)})" if reasons else ""))
    parts += _others(final, records)
    if not launches:
        return ", ".join(["no test launched", *parts[1:]])
    seconds = math.fsum(launch.wall_s for launch in launches)
    return ", ".join([*parts, f"{counted(len(launches), 'launch')} in {duration(seconds)}"])


def num_caught(records: Sequence[TestRecord]) -> int:
    """Return the number of regressions that tests have caught by ``pytest.raises`` or ``try``."""
    return sum(row.is_expected for record in records for row in record.verdicts)


def caught_text(count: int) -> str:
    """Return what a summary says of regressions that tests have caught; empty without any."""
    return f"{counted(count, 'regression')} caught by {'its test' if count == 1 else 'their tests'}" if count else ""


def _others(final: Sequence[TestRecord], records: Sequence[TestRecord]) -> list[str]:
    """Return the nonzero counts of caught regressions, new baselines and tests without a verdict."""
    comparisons = [comparison for record in final for comparison in record.comparisons]
    counts = (
        (sum(comparison.new is not None for comparison in comparisons), "baseline", "measured"),
        (sum(record.compared_nothing for record in final), "test", "without a comparison"),
        (sum(one.has_failed and not one.verdicts for one in final if one.launches), "test", "failed without a verdict"),
        (sum(record.failed_before_launch for record in final), "test", "failed before a launch"),
        (sum(not one.has_failed for one in final if one.lacked_devices), "test", "skipped for lack of devices"),
        (len(records) - len(final), "attempt", "retried"),
    )
    found = [f"{counted(count, noun)} {rest}" for count, noun, rest in counts if count]
    return [*filter(None, [caught_text(num_caught(final))]), *found]
