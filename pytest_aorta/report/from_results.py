"""Builds a report from two sets of kept results: matches launches of the same test, workload and config."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.files import files_below
from pytest_aorta.report.data import Case, Launch, Report, Test, read_launches, utc_now
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.folder import OUTCOME_FILE, PLAN_FILE, RESULT_FILE, is_rank_file
from pytest_aorta.session.record import Comparison, TestRecord
from pytest_aorta.session.rounds import failed_checks_text
from pytest_aorta.verdict.applicability import changed_settings, identity
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdicts

_MAX_PLAN_BYTES = 1 << 20


class _Key(NamedTuple):
    """The identity of a launch on both sides: the test's folder, the workload, and its config as JSON."""

    folder: str
    workload: str
    config: str


_Launches: TypeAlias = dict[_Key, list[Launch]]


def dataset_report(paths: Mapping[str, Sequence[Path]], candidate: str, reference: str) -> Report:
    """Compare the results of two labels.

    Args:
        paths: label -> result files, or folders that contain result files.
        candidate, reference: the labels of the two sides.

    Raises:
        UsageError: A path does not exist or contains no result.
    """
    warnings: list[str] = []
    here, there = (_read(label, paths[label], warnings) for label in (candidate, reference))
    if len(here) == len(there) == 1:  # one kind of launch on each side, so these two match whatever their names
        there = dict(zip(here, there.values(), strict=True))
    tests = []
    configs: Counter[tuple[str, str]] = Counter()
    for key in dict.fromkeys([*here, *there]):
        configs[key[:2]] += 1
        number = f" {configs[key[:2]]}" if configs[key[:2]] > 1 else ""
        name = key.workload if key.folder in ("", ".") else key.folder
        sides = {candidate: here.get(key, []), reference: there.get(key, [])}
        tests.append(_test(name, f"{key.workload}{number}", sides))
    failed = sum(map(_failed_launches, (*paths[candidate], *paths[reference])))
    compared = sum(map(len, (*here.values(), *there.values())))
    return Report(
        f"{candidate} against {reference}",
        utc_now(),
        candidate,
        reference,
        tuple(tests),
        tuple(warnings),
        num_launches=compared + failed,
        num_failed_launches=failed,
    )


def _read(label: str, paths: Sequence[Path], warnings: list[str]) -> _Launches:
    found: _Launches = {}
    for path in paths:
        files = list(_result_files(path))
        if not files:
            raise UsageError(f"{label}={path}: contains no {RESULT_FILE}; keep results with --aorta-results=DIR")
        for file in files:
            if _is_reference(file):
                warnings.append(f"result left out of the report: {file}: a launch of the A/B reference")
                continue
            folder = "" if path == file else file.parent.relative_to(path).parent.as_posix()
            for launch in read_launches([file], warnings):
                config = json.dumps(identity(launch.result.config), sort_keys=True)
                of_key = found.setdefault(_Key(folder, launch.result.workload, config), [])
                of_key.append(replace(launch, number=len(of_key) + 1))
    return found


def _result_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    yield from (file for file in files_below(path, RESULT_FILE) if not is_rank_file(file))


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


def _test(name: str, case: str, sides: Mapping[str, Sequence[Launch]]) -> Test:
    """Return the comparison of the launches of two labels, the candidate first."""
    (candidate, here), (reference, there) = sides.items()
    if here and there:
        verdicts = _verdicts(name, sides)
    else:
        verdicts = Verdicts(name, (), (f"only in {candidate if here else reference}: no result to compare with",))
    wrong = [launch.result for launch in here if not launch.result.passed]
    has_failed = wrong or any(row.outcome is Outcome.REGRESSION or row.is_lost for row in verdicts.rows)
    difference = _difference(sides) if here and there else ""
    comparison = Comparison(
        case,
        ReferenceKind.RESULTS,
        rows=verdicts.rows,
        notes=(*filter(None, [difference]), *verdicts.notes),
    )
    record = TestRecord(
        name,
        outcome="failed" if has_failed else "compared" if verdicts.rows else "measured",
        failure="\n".join(map(failed_checks_text, wrong)),
        comparisons=(comparison,),
    )
    return Test(record, (Case(case, verdicts.rows, tuple(here), tuple(there), reference_name=reference),))


def _difference(sides: Mapping[str, Sequence[Launch]]) -> str:
    """Return a note on the workloads and configs of two launches that were named on their own, if they differ."""
    (here, after), (there, before) = ((label, launches[0].result) for label, launches in sides.items())
    old, new = changed_settings(identity(before.config), identity(after.config))
    if not old and before.workload == after.workload:
        return ""
    parts = ((there, before.workload, old), (here, after.workload, new))
    return "; ".join(" with ".join(filter(None, [f"{label} ran {name}", keys])) for label, name, keys in parts)


def _verdicts(name: str, sides: Mapping[str, Sequence[Launch]]) -> Verdicts:
    """Compare the candidate's launches with the reference's as with a stored baseline."""
    (candidate, here), (reference, there) = sides.items()
    stored = tuple(StoredLaunch(_in_block(launch, reference)) for launch in there)
    result = here[0].result
    baseline = Baseline(name, name, result.platform, result.workload, {}, stored)
    priors = functools.partial(default_variance, device=result.device)
    comparison = StoredComparison(name, {}, baseline, {}, priors, len(here), reference, ReferenceKind.RESULTS)
    verdicts = comparison.judge([_in_block(launch, candidate) for launch in here])
    reasons = {
        Outcome.INCONCLUSIVE: f"too few launches to decide: {len(here)} of {candidate} and {len(there)} of {reference}",
        Outcome.MISSING: f"missing in {candidate} or in {reference}",
        Outcome.IMPROVED: "",
    }
    rows = tuple(row.replace(detail=reasons.get(row.outcome, row.detail)) for row in verdicts.rows)
    return verdicts.replace(rows=rows)


def _in_block(launch: Launch, label: str) -> LaunchFacts:
    """Return the facts in the session block of the launch.

    A result without provenance does not say in which block it was measured, so each label counts as a block of its own.
    """
    if launch.result.provenance is not None:
        return launch.facts
    return launch.facts.replace(block=hashlib.sha256(label.encode()).hexdigest()[:12])
