"""From folders of kept results to a report: the same launches in two sets, matched and compared."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.files import UnreadableFile, read_json
from pytest_aorta.report.data import Case, Launch, Report, Test, read_launches
from pytest_aorta.result.facts import RECORDED_AT_FORMAT
from pytest_aorta.session.text import failed_checks_text
from pytest_aorta.verdict.applicability import identity
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.priors import default_spread
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdicts

_MAX_PLAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """What has to be the same on both sides: the test's folder, the workload, and which of its configs it is."""

    folder: str
    workload: str
    config: int

    @property
    def name(self) -> str:
        """For people."""
        number = f" {self.config}" if self.config > 1 else ""
        return f"{self.workload}{number}"


Launches: TypeAlias = dict[Key, list[Launch]]


def dataset_report(paths: Mapping[str, Sequence[Path]], candidate: str, reference: str) -> Report:
    """Compare the results of two labels; ``paths`` are result files, or folders with such in them.

    Raises:
        UsageError: a path is not there, or holds no result.
    """
    warnings: list[str] = []
    here, there = (_read(label, paths[label], warnings) for label in (candidate, reference))
    if len(here) == len(there) == 1:  # two files, or two folders with one thing each: there is nothing to mistake
        there = dict(zip(here, there.values(), strict=True))
    keys = list(dict.fromkeys([*here, *there]))
    tests = tuple(_test(key, here.get(key, []), there.get(key, []), candidate, reference) for key in keys)
    created_at = time.strftime(RECORDED_AT_FORMAT, time.gmtime())
    return Report(f"{candidate} against {reference}", created_at, candidate, reference, tests, tuple(warnings))


def _read(label: str, paths: Sequence[Path], warnings: list[str]) -> Launches:
    found: Launches = {}
    configs: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        files = list(_result_files(path))
        if not files:
            raise UsageError(f"{label}={path}: there is no result.json; keep results with --aorta-results=DIR")
        for file in files:
            if _is_reference(file):
                warnings.append(f"left out of the report: {file}: a launch of an A/B's reference version")
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
    # A launch's ranks have files of this name too.
    yield from (file for file in sorted(path.rglob("result.json")) if file.parent.parent.name != "ranks")


def _is_reference(file: Path) -> bool:
    try:
        plan = read_json(file.with_name("plan.json"), max_bytes=_MAX_PLAN_BYTES)
    except UnreadableFile:  # a result that was copied out of its folder
        return False
    return isinstance(plan, dict) and bool(plan.get("reference"))


def _key(path: Path, file: Path, launch: Launch, configs: dict[tuple[str, str], list[str]]) -> Key:
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
        told = _verdicts(name, here, there, candidate, reference)
    else:
        told = Verdicts(name, (), (f"only in {candidate if here else reference}: there is nothing to compare it with",))
    wrong = [launch.result for launch in here if not launch.result.passed]
    is_red = wrong or any(row.outcome is Outcome.REGRESSION or row.is_lost for row in told.rows)
    outcome = "failed" if is_red else "compared" if told.rows else "measured"
    failure = "\n".join(map(failed_checks_text, wrong))
    case = Case(key.name, told.rows, tuple(here), tuple(there), against=reference)
    return Test(name, outcome, failure, told.notes, (case,))


def _verdicts(name: str, here: Sequence[Launch], there: Sequence[Launch], candidate: str, reference: str) -> Verdicts:
    """As against a stored baseline: a result does not say when it was measured, so that the two are two sittings."""
    stored = tuple(StoredLaunch(replace(launch.facts, sitting=_sitting(reference))) for launch in there)
    result = here[0].result
    baseline = Baseline(name, name, result.platform, result.workload, {}, stored)
    priors = functools.partial(default_spread, device=result.device)
    comparison = StoredComparison(name, {}, baseline, {}, priors, max_launches=len(here))
    told = comparison.judge([replace(launch.facts, sitting=_sitting(candidate)) for launch in here])
    undecided = f"{len(here)} of {candidate} and {len(there)} of {reference} do not decide"
    reasons = {
        Outcome.INCONCLUSIVE: undecided,
        Outcome.MISSING: f"{candidate} or {reference} has none",
        Outcome.IMPROVED: "",
    }
    rows = (replace(row, reason=reasons.get(row.outcome, row.reason), against=reference) for row in told.rows)
    return replace(told, rows=tuple(rows))


def _sitting(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:12]
