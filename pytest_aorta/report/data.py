"""The values of a report: tests, their comparisons, and the launches of each side."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pytest_aorta.common.errors import AortaError, BaselineError, UsageError
from pytest_aorta.common.files import UnreadableFile, files_below, read_json
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.folder import OUTCOME_FILE, PLAN_FILE, RESULT_FILE, is_rank_file
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.result.reading import read_result
from pytest_aorta.session.record import Comparison, Side, TestRecord
from pytest_aorta.session.rounds import failed_checks_text
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.environment import changed_settings, identity
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, ReferenceKind, Verdict, Verdicts

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
        warnings: the results and baselines that could not be read.
    """

    name: str
    verdicts: tuple[Verdict, ...] = ()
    candidate: tuple[Launch, ...] = ()
    reference: tuple[Launch, ...] = ()
    baseline: Baseline | None = None
    reference_name: str = AB_REFERENCE
    warnings: tuple[str, ...] = ()

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
    """The record of a test, or of one pair of matched results, with the launches of its comparisons.

    For results, the record's node id is their folder, and its outcome ``failed``, ``compared`` or ``measured``.
    """

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
    """The content of a report.

    ``candidate`` and ``reference`` are the names of the two sides. ``num_launches`` counts all launches, and
    ``num_failed_launches`` those of them that left no valid result. ``created_at`` is in UTC.
    """

    title: str
    candidate: str
    reference: str
    tests: tuple[Test, ...]
    warnings: tuple[str, ...] = ()
    num_launches: int = 0
    num_failed_launches: int = 0
    created_at: str = field(default_factory=lambda: time.strftime(UTC_FORMAT, time.gmtime()))

    @property
    def cases(self) -> list[Case]:
        """Return the comparisons of all tests."""
        return [case for test in self.tests for case in test.cases]

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


def _read_launches(
    files: Iterable[Path], facts: Iterable[LaunchFacts | None] = itertools.repeat(None)
) -> tuple[tuple[Launch, ...], tuple[str, ...]]:
    """Return the launches of result files, and a warning for each file that can't be read.

    The facts of launches are those of a record, or are condensed from the result.
    """
    launches: list[Launch] = []
    warnings: list[str] = []
    for number, (file, known) in enumerate(zip(files, facts, strict=False), 1):
        try:
            result = read_result(file)
            launches.append(Launch(number, result, known or result.facts))
        except (AortaError, ValueError) as error:
            warnings.append(f"result left out of the report: {error}")
    return tuple(launches), tuple(warnings)


def session_report(records: Sequence[TestRecord], *, title: str, lost: Sequence[TestRecord] = ()) -> Report:
    """Return the report of a session; results and baselines that can't be read become warnings.

    ``lost`` are records that are part of the report although nothing is known of their launches.
    """
    shown = [*(record for record in records if record.is_reported), *lost]
    tests = tuple(Test(record, tuple(_case(record, one) for one in record.comparisons)) for record in shown)
    warnings = tuple(warning for test in tests for case in test.cases for warning in case.warnings)
    launched = sum(len(record.launches) for record in records)
    failed = sum(record.num_failed_launches for record in records)
    return Report(title, "candidate", "baseline", tests, warnings, launched, failed)


def _case(record: TestRecord, comparison: Comparison) -> Case:
    kept = [launch for launch in comparison.launches if launch.folder]
    sides = ([launch for launch in kept if launch.side is side] for side in Side)
    (candidate, unread), (reference, others) = (
        _read_launches([Path(one.folder) / RESULT_FILE for one in side], [one.facts for one in side]) for side in sides
    )
    verdicts, warnings, baseline = comparison.rows, (*unread, *others), None
    # If the baseline belongs to another config, no verdict has a value of the baseline.
    is_compared = any(row.baseline is not None and row.reference.kind is ReferenceKind.BASELINE for row in verdicts)
    if is_compared and comparison.baseline:
        try:
            baseline = read_baseline_file(Path(comparison.baseline))
        except BaselineError as error:
            warnings = (*warnings, f"baseline left out of the report: {error}")
    versions = {row.reference.name for row in verdicts if row.reference.is_ab}
    name = f"{AB_REFERENCE} {' '.join(versions)}".rstrip()
    return Case(record.label_of(comparison), verdicts, candidate, reference, baseline, name, warnings)


_MAX_PLAN_BYTES = 1 << 20


class _Key(NamedTuple):
    """The identity of a launch on both sides: the test's folder, the workload, and its config as JSON."""

    folder: str
    workload: str
    config: str


class _Side(NamedTuple):
    """The launches of one label that are compared."""

    label: str
    launches: Sequence[Launch]


def dataset_report(paths: Mapping[str, Sequence[Path]], candidate: str, reference: str) -> Report:
    """Compare the results of two labels.

    Args:
        paths: label -> result files, or folders that contain result files.
        candidate, reference: the labels of the two sides.

    Raises:
        UsageError: A path does not exist or contains no result.
    """
    (here, unread), (there, others) = (_read(label, paths[label]) for label in (candidate, reference))
    if len(here) == len(there) == 1:  # one kind of launch on each side, so these two match whatever their names
        there = dict(zip(here, there.values(), strict=True))
    tests = []
    configs: Counter[tuple[str, str]] = Counter()
    for key in dict.fromkeys([*here, *there]):
        configs[key[:2]] += 1
        number = f" {configs[key[:2]]}" if configs[key[:2]] > 1 else ""
        name = key.workload if key.folder in ("", ".") else key.folder
        sides = _Side(candidate, here.get(key, ())), _Side(reference, there.get(key, ()))
        tests.append(_test(name, f"{key.workload}{number}", *sides))
    failed = sum(map(_failed_launches, (*paths[candidate], *paths[reference])))
    launched = failed + sum(map(len, (*here.values(), *there.values())))
    title = f"{candidate} against {reference}"
    return Report(title, candidate, reference, tuple(tests), (*unread, *others), launched, failed)


def _read(label: str, paths: Sequence[Path]) -> tuple[dict[_Key, list[Launch]], list[str]]:
    """Return the launches of one label, and a warning for each that is left out."""
    found: dict[_Key, list[Launch]] = {}
    warnings: list[str] = []
    for path in paths:
        files = [path] if path.is_file() else [one for one in files_below(path, RESULT_FILE) if not is_rank_file(one)]
        if not files:
            raise UsageError(f"{label}={path}: contains no {RESULT_FILE}; keep results with --aorta-results=DIR")
        for file in files:
            if _is_reference(file):
                warnings.append(f"result left out of the report: {file}: a launch of the A/B reference")
                continue
            folder = "" if path == file else file.parent.relative_to(path).parent.as_posix()
            read, unread = _read_launches([file])
            warnings += unread
            for launch in read:
                config = json.dumps(identity(launch.result.config), sort_keys=True)
                of_key = found.setdefault(_Key(folder, launch.result.workload, config), [])
                of_key.append(replace(launch, number=len(of_key) + 1))
    return found, warnings


def _failed_launches(path: Path) -> int:
    """Return the number of run folders whose launch has ended without a result, A/B references left out."""
    ended = (file.with_name(RESULT_FILE) for file in files_below(path, OUTCOME_FILE))
    return sum(not file.exists() and not _is_reference(file) for file in ended)


def _is_reference(file: Path) -> bool:
    try:
        plan = read_json(file.with_name(PLAN_FILE), max_bytes=_MAX_PLAN_BYTES)
    except UnreadableFile:  # a result that was copied out of its run folder
        return False
    return isinstance(plan, dict) and bool(plan.get("reference"))


def _test(name: str, case: str, candidate: _Side, reference: _Side) -> Test:
    """Return the comparison of the launches of two labels."""
    if candidate.launches and reference.launches:
        verdicts = _verdicts(name, candidate, reference)
    else:
        only = candidate if candidate.launches else reference
        verdicts = Verdicts(name, (), (Note(f"only in {only.label}: no result to compare with"),))
    wrong = [launch.result for launch in candidate.launches if not launch.result.passed]
    has_failed = wrong or any(row.outcome is Outcome.REGRESSION or row.is_lost for row in verdicts.rows)
    outcome = "failed" if has_failed else "compared" if verdicts.rows else "measured"
    rows, notes = verdicts.rows, verdicts.notes
    comparison = Comparison(case, ReferenceKind.RESULTS, rows=rows, notes=notes, suspect=verdicts.suspect)
    failure = "\n".join(map(failed_checks_text, wrong))
    record = TestRecord(name, outcome=outcome, failure=failure, comparisons=(comparison,))
    here, there = tuple(candidate.launches), tuple(reference.launches)
    return Test(record, (Case(case, rows, here, there, reference_name=reference.label),))


def _verdicts(name: str, candidate: _Side, reference: _Side) -> Verdicts:
    """Compare the candidate's launches with the reference's as with a stored baseline.

    Launches that were named on their own may differ in workload and config, which a note says.
    """
    after, before = candidate.launches[0].result, reference.launches[0].result
    stored = tuple(StoredLaunch(launch.facts) for launch in reference.launches)
    baseline = Baseline(name, name, after.platform, after.workload, {}, stored)
    count = len(candidate.launches)
    comparison = StoredComparison(name, {}, baseline, {}, count, reference.label, ReferenceKind.RESULTS)
    verdicts = comparison.judge([launch.facts for launch in candidate.launches])
    counts = f"{count} of {candidate.label} and {len(stored)} of {reference.label}"
    reasons = {
        Outcome.INCONCLUSIVE: f"too few launches to decide: {counts}",
        Outcome.MISSING: f"missing in {candidate.label} or in {reference.label}",
        Outcome.IMPROVED: "",
    }
    rows = tuple(row.replace(detail=reasons.get(row.outcome, row.detail)) for row in verdicts.rows)
    verdicts = verdicts.replace(rows=rows)
    old, new = changed_settings(identity(before.config), identity(after.config))
    if not old and before.workload == after.workload:
        return verdicts
    parts = ((reference.label, before.workload, old), (candidate.label, after.workload, new))
    ran = [" with ".join(filter(None, [f"{label} ran {workload}", keys])) for label, workload, keys in parts]
    return verdicts.replace(notes=(Note("; ".join(ran)), *verdicts.notes))
