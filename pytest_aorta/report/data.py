"""The values of a report: tests, their comparisons, and the launches of each side."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.folder import RESULT_FILE
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.result.reading import read_result
from pytest_aorta.session.record import Comparison, Side, TestRecord, totals
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file
from pytest_aorta.verdict.verdicts import ReferenceKind

# The name of the other variant or version in an A/B.
AB_REFERENCE = "A/B reference"


@dataclass(frozen=True)
class Case:
    """A comparison of a test.

    Attributes:
        name: the comparison's label, without the test's node id.
        comparison: the comparison.
        results: the result of each side's launches that could be read, by the launch's number, which counts from 1.
        baseline: the baseline that the candidate was compared with.
        warnings: the results and baselines that could not be read.
    """

    name: str
    comparison: Comparison
    results: Mapping[Side, Mapping[int, WorkloadResult]] = field(default_factory=lambda: {side: {} for side in Side})
    baseline: Baseline | None = None
    warnings: tuple[str, ...] = ()

    @property
    def candidate(self) -> list[LaunchFacts]:
        """Return the launches under test."""
        return self.comparison.facts(Side.CANDIDATE)

    @property
    def reference(self) -> list[LaunchFacts]:
        """Return the launches of the A/B reference; empty except in an A/B."""
        return self.comparison.facts(Side.REFERENCE)

    @property
    def reference_name(self) -> str:
        """Return the name of the reference's side."""
        versions = {row.reference.name for row in self.comparison.rows if row.reference.is_ab}
        return f"{AB_REFERENCE} {' '.join(versions)}".rstrip()

    @property
    def baseline_name(self) -> str:
        """Return the name of the stored baseline's side, with its revision."""
        return f"stored baseline\N{NO-BREAK SPACE}{self.baseline.revision}" if self.baseline else "stored baseline"

    @property
    def others_name(self) -> str:
        """Return the name of the side of :attr:`others`."""
        return self.reference_name if self.reference else self.baseline_name

    @property
    def others(self) -> Launches:
        """Return the launches of the other side: those of the A/B reference, else those of the baseline's center."""
        return self.reference or (self.baseline.center_launches if self.baseline else ())

    @property
    def sides(self) -> list[tuple[str, Launches, list[WorkloadResult]]]:
        """Return name, facts and results of the launches under test, then those of the other side."""
        here, there = ([*results.values()] for results in self.results.values())
        return [(Side.CANDIDATE, self.candidate, here), (self.others_name, self.others, there)]


@dataclass(frozen=True)
class Test:
    """The record of a test, with the launches of its comparisons."""

    __test__ = False

    record: TestRecord
    cases: tuple[Case, ...] = ()

    @property
    def failure(self) -> str:
        """Return the reason of a failure with its evidence, or the reason why the test was skipped."""
        return self.record.failure or self.record.lacked_devices or ""

    @property
    def opening(self) -> list[str]:
        """Return the sentences on what was edited; the failure's first line where no comparison failed the test."""
        has_verdicts = any(comparison.failing for comparison in self.record.comparisons)
        return self.record.edits or ([] if has_verdicts else self.failure.splitlines()[:1])

    @property
    def evidence(self) -> str:
        """Return the failure without its opening."""
        return self.failure.removeprefix("\n".join(self.opening)).lstrip("\n")


@dataclass(frozen=True)
class Report:
    """The content of a report: the line of the summary in ``totals``, and its time, ``created_at``, in UTC."""

    title: str
    tests: tuple[Test, ...]
    warnings: tuple[str, ...] = ()
    totals: str = ""
    created_at: str = field(default_factory=lambda: time.strftime(UTC_FORMAT, time.gmtime()))

    @property
    def cases(self) -> list[Case]:
        """Return the comparisons of all tests."""
        return [case for test in self.tests for case in test.cases]

    @property
    def final(self) -> tuple[TestRecord, ...]:
        """Return the records of the tests without the attempts that were retried."""
        return tuple(test.record for test in self.tests if not test.record.is_retried)


def session_report(records: Sequence[TestRecord], *, title: str, lost: Sequence[TestRecord] = ()) -> Report:
    """Return the report of a session; results and baselines that can't be read become warnings.

    ``lost`` are records that are part of the report although nothing is known of their launches.
    """
    shown = [*(record for record in records if record.is_reported), *lost]
    tests = tuple(Test(record, tuple(_case(record, one) for one in record.comparisons)) for record in shown)
    warnings = tuple(warning for test in tests for case in test.cases for warning in case.warnings)
    return Report(title, tests, warnings, totals(shown))


def _case(record: TestRecord, comparison: Comparison) -> Case:
    results: dict[Side, dict[int, WorkloadResult]] = {side: {} for side in Side}
    warnings: list[str] = []
    for side, found in results.items():
        launches = (launch for launch in comparison.launches if launch.side is side)
        for number, launch in enumerate(launches, 1):
            try:
                found |= {number: read_result(Path(launch.folder) / RESULT_FILE)} if launch.folder else {}
            except (AortaError, ValueError) as error:
                warnings.append(f"result left out of the report: {error}")
    baseline = None
    # If the baseline belongs to another config, no verdict has a value of the baseline.
    compared = (row for row in comparison.rows if row.reference.kind is ReferenceKind.BASELINE)
    if comparison.baseline and any(row.baseline is not None for row in compared):
        try:
            baseline = read_baseline_file(Path(comparison.baseline))
        except BaselineError as error:
            warnings.append(f"baseline left out of the report: {error}")
    return Case(record.label_of(comparison), comparison, results, baseline, tuple(warnings))
