"""The values of a report: tests, their comparisons, and the launches of each side."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.folder import RESULT_FILE
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.provenance import UTC_FORMAT, Provenance, version_text
from pytest_aorta.result.reading import read_result
from pytest_aorta.result.trace.rank_files import Iteration, read_iterations
from pytest_aorta.session.record import RETRIED, Comparison, Side, TestRecord
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdict

# The name of the other variant or version in an A/B.
AB_REFERENCE = "A/B reference"


@dataclass(frozen=True)
class Launch:
    """A launch with its result.

    Attributes:
        number: counts the launches of one side from 1.
        iterations: steps whose overlap is in the ranks' telemetry; empty without telemetry.
    """

    number: int
    result: WorkloadResult
    facts: LaunchFacts
    iterations: tuple[Iteration, ...] = ()


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
        return (
            f"stored baseline, revision\N{NO-BREAK SPACE}{self.baseline.revision}"
            if self.baseline
            else "stored baseline"
        )

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
    """A test, or one pair of matched results.

    Attributes:
        nodeid: the test's node id, or the folder of the results.
        outcome: pytest's outcome, such as ``passed``; for results, ``failed``, ``compared`` or ``measured``.
        failure: the reason of a failure with its evidence.
        notes: remarks beside the verdicts.
        cases: the test's comparisons.
        attempt: number of this attempt to run the test, counted from 1.
        label: the attempt as text for a test that ran more than once, else empty.
        failed_before_launch: True if the test failed and had launched nothing.
        lacked_devices: True if the test was skipped because the host has too few devices.
        num_failed_launches: number of its launches that left no valid result.
    """

    __test__ = False

    nodeid: str
    outcome: str
    failure: str = ""
    notes: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    attempt: int = 1
    label: str = ""
    failed_before_launch: bool = False
    lacked_devices: bool = False
    num_failed_launches: int = 0

    @property
    def is_retried(self) -> bool:
        """Return whether a later attempt of the test counts in place of this one."""
        return self.outcome == RETRIED

    @property
    def is_failing(self) -> bool:
        """Return whether the test failed."""
        return self.outcome in ("failed", "error")

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts of all comparisons."""
        return tuple(verdict for case in self.cases for verdict in case.verdicts)


@dataclass(frozen=True)
class _Remark:
    """A count beside the outcomes of the tests; ``is_failure`` is True if something failed."""

    text: str
    is_failure: bool = False


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
    def has_result(self) -> bool:
        """Return whether a launch left a result that could be read."""
        return any(case.candidate or case.reference for test in self.tests for case in test.cases)

    @property
    def final(self) -> tuple[Test, ...]:
        """Return the tests without the attempts that were retried."""
        return tuple(test for test in self.tests if not test.is_retried)

    @property
    def remarks(self) -> tuple[_Remark, ...]:
        """Return the number of launches, then the other counts that are not zero.

        The other counts are launches that failed, tests that failed before a launch, tests without enough devices, and
        attempts that were retried.
        """
        early = sum(test.failed_before_launch for test in self.final)
        lacking = sum(test.lacked_devices for test in self.final)
        counts = (
            (self.num_failed_launches, _Remark(f"{counted(self.num_failed_launches, 'launch')} failed", True)),
            (early, _Remark(f"{counted(early, 'test')} failed before a launch", True)),
            (lacking, _Remark(f"{counted(lacking, 'test')} skipped for lack of devices")),
            (retried := len(self.tests) - len(self.final), _Remark(f"{counted(retried, 'attempt')} retried")),
        )
        launches = _Remark(f"{self.num_launches} in total")
        return (launches, *(remark for count, remark in counts if count))


def read_launches(files: Sequence[Path]) -> tuple[tuple[Launch, ...], list[str]]:
    """Return the launches of result files, with their telemetry, and a problem for each file that can't be read."""
    launches: list[Launch] = []
    problems: list[str] = []
    for number, file in enumerate(files, 1):
        try:
            result = read_result(file)
            launch = Launch(number, result, launch_facts(result))
        except (AortaError, ValueError) as error:
            problems.append(f"result left out of the report: {error}")
            continue
        try:
            launch = replace(launch, iterations=read_iterations(file.parent, result.world_size))
        except AortaError as error:
            problems.append(f"telemetry left out of the report: {error}")
        launches.append(launch)
    return tuple(launches), problems


def session_report(records: Sequence[TestRecord], *, title: str, lost: Sequence[TestRecord] = ()) -> Report:
    """Return the report of a session; results and baselines that can't be read become warnings.

    ``lost`` are records that are part of the report although nothing is known of their launches.
    """
    warnings: list[str] = []
    tests = tuple(_test(record, warnings) for record in (*reported(records), *lost))
    created_at = time.strftime(UTC_FORMAT, time.gmtime())
    return Report(
        title,
        created_at,
        "candidate",
        "baseline",
        tests,
        tuple(warnings),
        num_launches=sum(len(record.launches) for record in records),
        num_failed_launches=sum(record.num_failed_launches for record in records),
    )


def reported(records: Sequence[TestRecord]) -> list[TestRecord]:
    """Return the records of tests that launched something, lacked devices for a launch, or failed before a launch."""
    return [record for record in records if record.is_reported]


def _test(record: TestRecord, warnings: list[str]) -> Test:
    cases = tuple(_case(record, comparison, warnings) for comparison in record.comparisons)
    reason = record.failure or record.lacked_devices or ""
    return Test(
        record.nodeid,
        record.outcome,
        reason,
        (*record.traces, *record.notes),
        cases,
        attempt=record.attempt,
        label=record.attempt_label,
        failed_before_launch=record.failed_before_launch,
        lacked_devices=record.is_skipped,
        num_failed_launches=record.num_failed_launches,
    )


def _case(record: TestRecord, comparison: Comparison, warnings: list[str]) -> Case:
    sides = []
    for side in Side:
        launches, problems = read_launches([Path(folder) / RESULT_FILE for folder in comparison.folders(side)])
        warnings += problems
        sides.append(launches)
    verdicts = comparison.rows
    name = comparison.case.removeprefix(f"{record.nodeid}::")
    # If the baseline belongs to another config, no verdict has a value of the baseline.
    is_compared = any(row.baseline is not None and row.reference.kind is ReferenceKind.BASELINE for row in verdicts)
    baseline = _baseline(comparison.baseline, warnings) if is_compared else None
    versions = {row.reference.name for row in verdicts if row.is_by_ab}
    reference_name = f"{AB_REFERENCE} {' '.join(versions)}".rstrip()
    return Case(name, verdicts, sides[0], sides[1], baseline, reference_name)


def _baseline(file: str, warnings: list[str]) -> Baseline | None:
    if not file:
        return None
    try:
        return read_baseline_file(Path(file))
    except BaselineError as error:
        warnings.append(f"baseline left out of the report: {error}")
        return None


NOT_KNOWN = "unknown"


_CPU = "CPU ranks"


def run_pairs(version: Provenance | LaunchFacts, command: Sequence[str]) -> list[tuple[str, str]]:
    """Return the known facts about a run in which no launch left a result: commit, branch and command."""
    return [
        ("commit", version_text(version.commit, version.dirty) or NOT_KNOWN),
        ("branch", version.branch or ("none (detached head)" if version.commit else NOT_KNOWN)),
        ("command", shlex.join(command) or NOT_KNOWN),
    ]


def provenance_pairs(launch: LaunchFacts, command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return what was measured, when, where and by which command, as pairs of a label and a value.

    The labels and their order are always the same, and a value that was not stored is "unknown".

    Args:
        launch: A launch of this run, of a result or of a baseline.
        command: Words of the run's command line, for a launch that has none.
    """
    commit, branch, words = run_pairs(launch, launch.command or command)
    device = _CPU if launch.device == "cpu" else str(launch.environment.get("device_name") or NOT_KNOWN)
    return [
        commit,
        branch,
        ("measured", launch.recorded_at),
        ("device", device),
        ("torch", str(launch.environment.get("torch") or NOT_KNOWN)),
        words,
    ]
