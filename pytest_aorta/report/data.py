"""The values of a report: tests, their comparisons, and the launches of each side."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.folder import RESULT_FILE
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.provenance import UTC_FORMAT, Provenance, version_text
from pytest_aorta.result.reading import read_result
from pytest_aorta.session.record import Comparison, Side, TestRecord
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdict

# The name of the other variant or version in an A/B.
AB_REFERENCE = "A/B reference"


@dataclass(frozen=True)
class Launch:
    """A launch with its result.

    Attributes:
        number: counts the launches of one side from 1.
    """

    number: int
    result: WorkloadResult
    facts: LaunchFacts


@dataclass(frozen=True)
class Case:
    """A comparison of a test.

    Attributes:
        name: the comparison's label, without the test's node id.
        verdicts: one verdict per metric.
        candidate, reference: launches whose results could be read; ``reference`` is empty except in an A/B.
        baseline: the baseline that the candidate was compared with.
        reference_name: the name of the reference's side.
    """

    name: str
    verdicts: tuple[Verdict, ...] = ()
    candidate: tuple[Launch, ...] = ()
    reference: tuple[Launch, ...] = ()
    baseline: Baseline | None = None
    reference_name: str = AB_REFERENCE

    @property
    def baseline_name(self) -> str:
        """Return the name of the stored baseline's side, with its revision."""
        return f"stored baseline\N{NO-BREAK SPACE}{self.baseline.revision}" if self.baseline else "stored baseline"

    @property
    def others_name(self) -> str:
        """Return the name of the side of :attr:`others`."""
        return self.reference_name if self.reference else self.baseline_name

    @property
    def others(self) -> tuple[LaunchFacts, ...]:
        """Return the launches of the other side: those of the A/B reference, else those of the baseline's center."""
        if self.reference:
            return tuple(launch.facts for launch in self.reference)
        return self.baseline.center_launches if self.baseline else ()


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


@dataclass(frozen=True)
class Report:
    """The content of a report.

    ``candidate`` and ``reference`` are the names of the two sides. ``num_launches`` counts all launches, and
    ``num_failed_launches`` those of them that left no valid result. ``run`` identifies the version of a run that left
    no result, as labels with values.
    """

    title: str
    created_at: str
    candidate: str
    reference: str
    tests: tuple[Test, ...]
    warnings: tuple[str, ...] = ()
    num_launches: int = 0
    num_failed_launches: int = 0
    run: tuple[tuple[str, str], ...] = ()

    @property
    def cases(self) -> list[Case]:
        """Return the comparisons of all tests."""
        return [case for test in self.tests for case in test.cases]

    @property
    def has_result(self) -> bool:
        """Return whether a launch left a result that could be read."""
        return any(case.candidate or case.reference for case in self.cases)

    @property
    def final(self) -> tuple[TestRecord, ...]:
        """Return the records of the tests without the attempts that were retried."""
        return tuple(test.record for test in self.tests if not test.record.is_retried)

    @property
    def remarks(self) -> dict[str, bool]:
        """Return the number of launches, then the other counts that are not zero -> whether something failed.

        The other counts are launches that failed, tests that failed before a launch, tests without enough devices, and
        attempts that were retried.
        """
        counts = (
            (self.num_failed_launches, "launch", "failed", True),
            (sum(record.failed_before_launch for record in self.final), "test", "failed before a launch", True),
            (sum(record.is_skipped for record in self.final), "test", "skipped for lack of devices", False),
            (len(self.tests) - len(self.final), "attempt", "retried", False),
        )
        found = {f"{counted(count, noun)} {rest}": is_failure for count, noun, rest, is_failure in counts if count}
        return {f"{self.num_launches} in total": False} | found


def read_launches(files: Sequence[Path], warnings: list[str]) -> tuple[Launch, ...]:
    """Return the launches of result files; what can't be read is added to ``warnings``."""
    launches: list[Launch] = []
    for number, file in enumerate(files, 1):
        try:
            result = read_result(file)
            launch = Launch(number, result, launch_facts(result))
        except (AortaError, ValueError) as error:
            warnings.append(f"result left out of the report: {error}")
            continue
        launches.append(launch)
    return tuple(launches)


def session_report(records: Sequence[TestRecord], *, title: str, lost: Sequence[TestRecord] = ()) -> Report:
    """Return the report of a session; results and baselines that can't be read become warnings.

    ``lost`` are records that are part of the report although nothing is known of their launches.
    """
    warnings: list[str] = []
    tests = tuple(
        Test(record, tuple(_case(record, comparison, warnings) for comparison in record.comparisons))
        for record in (*(record for record in records if record.is_reported), *lost)
    )
    return Report(
        title,
        _utc_now(),
        "candidate",
        "baseline",
        tests,
        tuple(warnings),
        num_launches=sum(len(record.launches) for record in records),
        num_failed_launches=sum(record.num_failed_launches for record in records),
    )


def _utc_now() -> str:
    """Return the present time in the format of reports."""
    return time.strftime(UTC_FORMAT, time.gmtime())


def _case(record: TestRecord, comparison: Comparison, warnings: list[str]) -> Case:
    candidate, reference = (
        read_launches([Path(folder) / RESULT_FILE for folder in comparison.folders(side)], warnings) for side in Side
    )
    verdicts = comparison.rows
    # If the baseline belongs to another config, no verdict has a value of the baseline.
    is_compared = any(row.baseline is not None and row.reference.kind is ReferenceKind.BASELINE for row in verdicts)
    baseline = None
    if is_compared and comparison.baseline:
        try:
            baseline = read_baseline_file(Path(comparison.baseline))
        except BaselineError as error:
            warnings.append(f"baseline left out of the report: {error}")
    versions = {row.reference.name for row in verdicts if row.is_by_ab}
    name = f"{AB_REFERENCE} {' '.join(versions)}".rstrip()
    return Case(record.label_of(comparison), verdicts, candidate, reference, baseline, name)


_NOT_KNOWN = "unknown"


def run_pairs(version: Provenance | LaunchFacts, command: Sequence[str]) -> list[tuple[str, str]]:
    """Return the known facts about a run in which no launch left a result: commit, branch and command."""
    return [
        ("commit", version_text(version.commit, version.dirty) or _NOT_KNOWN),
        ("branch", version.branch or ("none (detached head)" if version.commit else _NOT_KNOWN)),
        ("command", shlex.join(command) or _NOT_KNOWN),
    ]


def provenance_pairs(launch: LaunchFacts, command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return what was measured, when, where and by which command, as pairs of a label and a value.

    The labels and their order are always the same, and a value that was not stored is "unknown".

    Args:
        launch: A launch of this run, of a result or of a baseline.
        command: Words of the run's command line, for a launch that has none.
    """
    commit, branch, words = run_pairs(launch, launch.command or command)
    device = "CPU ranks" if launch.device == "cpu" else str(launch.environment.get("device_name") or _NOT_KNOWN)
    return [
        commit,
        branch,
        ("measured", launch.recorded_at),
        ("device", device),
        ("torch", str(launch.environment.get("torch") or _NOT_KNOWN)),
        words,
    ]


def provenance_values(launches: Sequence[LaunchFacts], command: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return each label of :func:`provenance_pairs` -> its distinct values; of the times, the first and the last."""
    columns = zip(*(provenance_pairs(facts, command) for facts in launches), strict=True)
    values = {column[0][0]: list(dict.fromkeys(value for _, value in column)) for column in columns}
    if times := values.get("measured"):
        values["measured"] = list(dict.fromkeys((min(times), max(times))))
    return values
