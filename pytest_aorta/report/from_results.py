"""Builds a report from two sets of kept results: matches launches of the same test, workload and config."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.files import files_below
from pytest_aorta.report.data import Case, Launch, Report, Test, read_launches
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.folder import OUTCOME_FILE, PLAN_FILE, RESULT_FILE, is_rank_file
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.rounds import failed_checks_text
from pytest_aorta.verdict.applicability import changed_settings, identity
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdicts

_MAX_PLAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """The identity of a launch on both sides: the test's folder, the workload, and the number of its config."""

    folder: str
    workload: str
    config: int

    @property
    def name(self) -> str:
        """Return the name of the comparison."""
        number = f" {self.config}" if self.config > 1 else ""
        return f"{self.workload}{number}"


Launches: TypeAlias = dict[Key, list[Launch]]
# The configs of each folder and workload on either side, in the order of their numbers.
Configs: TypeAlias = dict[tuple[str, str], list[str]]


def dataset_report(paths: Mapping[str, Sequence[Path]], candidate: str, reference: str) -> Report:
    """Compare the results of two labels.

    Args:
        paths: label -> result files, or folders that contain result files.
        candidate, reference: the labels of the two sides.

    Raises:
        UsageError: A path does not exist or contains no result.
    """
    warnings: list[str] = []
    configs: Configs = {}
    here, there = (_read(label, paths[label], configs, warnings) for label in (candidate, reference))
    if len(here) == len(there) == 1:  # one kind of launch on each side, so these two match whatever their names
        there = dict(zip(here, there.values(), strict=True))
    keys = list(dict.fromkeys([*here, *there]))
    tests = tuple(_test(key, here.get(key, []), there.get(key, []), candidate, reference) for key in keys)
    created_at = time.strftime(UTC_FORMAT, time.gmtime())
    failed = sum(map(_failed_launches, (*paths[candidate], *paths[reference])))
    compared = sum(map(len, (*here.values(), *there.values())))
    return Report(
        f"{candidate} against {reference}",
        created_at,
        candidate,
        reference,
        tests,
        tuple(warnings),
        num_launches=compared + failed,
        num_failed_launches=failed,
    )


def _read(label: str, paths: Sequence[Path], configs: Configs, warnings: list[str]) -> Launches:
    found: Launches = {}
    for path in paths:
        files = list(_result_files(path))
        if not files:
            raise UsageError(f"{label}={path}: contains no {RESULT_FILE}; keep results with --aorta-results=DIR")
        for file in files:
            if _is_reference(file):
                warnings.append(f"result left out of the report: {file}: a launch of the A/B reference")
                continue
            launches, problems = read_launches([file])
            warnings += problems
            for launch in launches:
                key = _key(path, file, launch, configs)
                numbered = replace(launch, number=len(found.get(key, ())) + 1)
                found.setdefault(key, []).append(numbered)
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


def _key(path: Path, file: Path, launch: Launch, configs: Configs) -> Key:
    folder = "" if path == file else file.parent.relative_to(path).parent.as_posix()
    workload = launch.result.workload
    config = json.dumps(identity(launch.result.config), sort_keys=True)
    known = configs.setdefault((folder, workload), [])
    if config not in known:
        known.append(config)
    return Key(folder, workload, known.index(config) + 1)


def _test(key: Key, here: Sequence[Launch], there: Sequence[Launch], candidate: str, reference: str) -> Test:
    name = key.folder if key.folder not in ("", ".") else key.workload
    if here and there:
        verdicts = _verdicts(name, here, there, candidate, reference)
    else:
        verdicts = Verdicts(name, (), (f"only in {candidate if here else reference}: no result to compare with",))
    wrong = [launch.result for launch in here if not launch.result.passed]
    has_failed = wrong or any(row.outcome is Outcome.REGRESSION or row.is_lost for row in verdicts.rows)
    outcome = "failed" if has_failed else "compared" if verdicts.rows else "measured"
    failure = "\n".join(map(failed_checks_text, wrong))
    case = Case(key.name, verdicts.rows, tuple(here), tuple(there), reference_name=reference)
    differences = [_difference(here[0], there[0], candidate, reference)] if here and there else []
    return Test(name, outcome, failure, (*filter(None, differences), *verdicts.notes), (case,))


def _difference(here: Launch, there: Launch, candidate: str, reference: str) -> str:
    """Return a note on the workloads and configs of two launches that were named on their own, if they differ."""
    before, after = changed_settings(identity(there.result.config), identity(here.result.config))
    ran = [one.result.workload for one in (there, here)]
    if not before and ran[0] == ran[1]:
        return ""
    sides = zip((reference, candidate), ran, (before, after), strict=True)
    return "; ".join(" with ".join(filter(None, [f"{label} ran {name}", keys])) for label, name, keys in sides)


def _verdicts(name: str, here: Sequence[Launch], there: Sequence[Launch], candidate: str, reference: str) -> Verdicts:
    """Compare the candidate's launches with the reference's as with a stored baseline."""
    stored = tuple(StoredLaunch(_in_block(launch, reference)) for launch in there)
    result = here[0].result
    baseline = Baseline(name, name, result.platform, result.workload, {}, stored)
    priors = functools.partial(default_variance, device=result.device)
    comparison = StoredComparison(name, {}, baseline, {}, priors, len(here), reference, ReferenceKind.RESULTS)
    verdicts = comparison.judge([_in_block(launch, candidate) for launch in here])
    undecided = f"too few launches to decide: {len(here)} of {candidate} and {len(there)} of {reference}"
    reasons = {
        Outcome.INCONCLUSIVE: undecided,
        Outcome.MISSING: f"missing in {candidate} or in {reference}",
        Outcome.IMPROVED: "",
    }
    rows = (msgspec.structs.replace(row, detail=reasons.get(row.outcome, row.detail)) for row in verdicts.rows)
    return msgspec.structs.replace(verdicts, rows=tuple(rows))


def _in_block(launch: Launch, label: str) -> LaunchFacts:
    """Return the facts in the session block of the launch.

    A result without provenance does not say in which block it was measured, so each label counts as a block of its own.
    """
    if launch.result.provenance is not None:
        return launch.facts
    return launch.facts.replace(block=hashlib.sha256(label.encode()).hexdigest()[:12])
