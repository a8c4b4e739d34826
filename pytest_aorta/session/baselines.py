"""Recording of baselines: launches of an interrupted recording, the files of passed tests, and unused baselines."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import AortaError, BaselineError, ComparisonFailed
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import code_digest
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side, TestRecord
from pytest_aorta.session.rounds import comparison_text
from pytest_aorta.verdict.applicability import TEST_HOOK_KEY, identity, other_setup
from pytest_aorta.verdict.baseline import (
    Baseline,
    StoredLaunch,
    baseline_path,
    locked_baselines,
    orphans,
    read_baseline,
    read_baseline_file,
    write_baseline,
)
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.learning import (
    NewLaunches,
    detection_lines,
    launches_to_learn,
    objections,
    other_setting,
)
from pytest_aorta.verdict.metrics import METRICS, Tolerance, format_value, middle
from pytest_aorta.verdict.noise import blocks, platform_priors
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import ReferenceKind, Verdicts

# pytest's word for the outcome of a test that neither passed nor failed -> the outcome in words.
_ENDS = {
    "skipped": "was skipped after its comparison",
    "xfailed": "failed, as its mark xfail expects",
    "xpassed": "passed in spite of its mark xfail",
}
# Begin of a line on an interrupted recording.
_UNUSED = "launches of an interrupted recording are not used"


@dataclass(frozen=True)
class _Learned:
    """Launches that become a baseline if the test passes.

    Attributes:
        new: The launches, to be merged with the stored baseline.
        verdicts: The comparison of the new baseline with itself.
        detection: Lines on an interrupted recording, and on the changes that the baseline will detect.
    """

    new: NewLaunches
    verdicts: Verdicts
    detection: tuple[str, ...]


def learn(
    first: Baseline, marked: Mapping[str, Tolerance], defaults: Mapping[str, Any], options: Options
) -> Generator[Side, LaunchFacts, _Learned]:
    """Ask for as many launches as a baseline needs, like a comparison of :mod:`pytest_aorta.session.rounds`.

    Args:
        first: The first launch, as a baseline of its own.
        marked: The tolerances that markers set.
        defaults: The default of each config key.
        options: The options of the run.

    Raises:
        BaselineError: The launches are too noisy, ran under a profiler or with a planted fault, or can't be added.
        ComparisonFailed: A metric is missing in a launch.
    """
    case, config, (facts,) = first.case, first.config, first.center_launches
    if config.get(TEST_HOOK_KEY, {}) not in ({}, None):
        raise BaselineError(f"{case}: not recorded: the config plants a {TEST_HOOK_KEY}")
    if profiler := facts.profiler:
        raise BaselineError(
            f"{case}: not recorded: ranks ran under {profiler}, which slows them; record without {profiler}"
        )
    first = first.replace(config=identity(config))
    launches, note = yield from recorded(options, first, launches_to_learn(marked, facts, options.launches))
    priors = platform_priors(options.baselines_dir, first.platform, facts.device, case)
    problems = objections(launches, marked, priors)
    if problems and options.recording.reason is None:
        raise BaselineError(_noisy_text(case, problems))
    baseline = _with_launches(first, launches)
    if problems:
        baseline = baseline.replace(forced={str(baseline.revision): str(options.recording.reason)})
    # Comparing the baseline with itself shows metrics that are missing or differ between launches.
    verdicts = StoredComparison(case, first.config, baseline, marked, priors, len(launches)).judge(launches)
    if failing := verdicts.failing({Outcome.MISSING}):
        compared = tuple(ComparedLaunch(Side.CANDIDATE, launch) for launch in launches)
        recorded_now = Comparison(case, platform=first.platform, workload=first.workload, launches=compared)
        raise ComparisonFailed(comparison_text(recorded_now, failing))
    new = NewLaunches(baseline, dict(marked), dict(defaults), options.recording.replaces)
    # Merge now, so that launches that can't be added fail the test. They are merged again when the session ends,
    # since other sessions may have updated the baseline by then.
    stored = new.merged(options.baselines_dir)
    _keep(options, first, launches)  # the rest of the test may be interrupted
    noted = [f"  {note}"] if note else []
    return _Learned(new, verdicts, (*noted, *detection_lines(stored, marked, priors, options.max_launches)))


def recorded(
    options: Options, first: Baseline, wanted: int
) -> Generator[Side, LaunchFacts, tuple[list[LaunchFacts], str]]:
    """Ask for the launches of a recording, kept in a file until the test ends.

    An interruption leaves the file behind, and the next recording of the same code, config and session block continues
    with its launches. A launch or a test that fails leaves no file. Without ``options.unfinished``, or if git does not
    report the version of the code, no file is written.

    Returns:
        ``wanted`` launches: those of an interrupted recording, the launch of ``first``, and further ones; and a line on
        the launches of an interrupted recording, whether they are used or not, which is empty without any.

    Raises:
        BaselineError: The file of an interrupted recording can't be read or written.
    """
    earlier, note = _earlier(options, first)
    # A negative index, as the latest launches are kept; a single launch is recorded by itself.
    if used := earlier[1 - wanted :] if wanted > 1 else ():
        note = f"{counted(len(used), 'launch')} of an interrupted recording among them"
    launches = [*used, *first.center_launches]
    try:
        while len(launches) < wanted:
            _keep(options, first, launches)
            launches.append((yield Side.CANDIDATE))
    except AortaError:
        drop_unfinished(options, first)
        raise
    drop_unfinished(options, first)
    return launches, note


def _keep(options: Options, first: Baseline, launches: Sequence[LaunchFacts]) -> None:
    """Keep launches until further ones are kept or the test ends."""
    if folder := _folder_of_code(options):
        write_baseline(folder, _with_launches(first, launches))


def _earlier(options: Options, first: Baseline) -> tuple[Sequence[LaunchFacts], str]:
    """Return the launches of an interrupted recording that a recording continues, or why there are none."""
    folder = _folder_of_code(options)
    kept = read_baseline(folder, first.platform, first.case) if folder else None
    if kept is None:
        return (), f"{_UNUSED}: the code has changed since" if _unfinished_files(options, first) else ""
    problem = _difference(kept, first)
    return ((), f"{_UNUSED}: {problem}") if problem else (kept.center_launches, "")


def _unfinished_files(options: Options, baseline: Baseline) -> list[Path]:
    """Return the files of a case's unfinished recordings, of any version of the code."""
    pattern = baseline_path(Path("*"), baseline.platform, baseline.case)
    return sorted(options.unfinished.glob(str(pattern))) if options.unfinished else []


def drop_unfinished(options: Options, baseline: Baseline) -> None:
    """Remove the launches of ``baseline``'s case that were kept while they were recorded."""
    for path in _unfinished_files(options, baseline):
        path.unlink(missing_ok=True)


def _folder_of_code(options: Options) -> Path | None:
    """Return the folder of recordings of this version of the code; None if none are kept or git gives no version."""
    code = code_digest(options.rootdir, options.baselines_dir) if options.unfinished else None
    return options.unfinished / code if options.unfinished and code else None


def _with_launches(first: Baseline, launches: Sequence[LaunchFacts]) -> Baseline:
    return first.replace(launches=tuple(StoredLaunch(launch) for launch in launches))


def _difference(kept: Baseline, first: Baseline) -> str | None:
    """Return why launches of an interrupted recording differ from the first launch of this one, or None."""
    last, facts = kept.center_launches[-1], first.center_launches[0]
    if detail := other_setup(kept, first.workload, first.config, [facts]):
        return detail
    if settings := other_setting(last, [facts]):
        return settings[0]
    # The launches of a recording share the noise of one session block.
    return "they belong to another session block" if len(set(blocks([last, facts]))) > 1 else None


def unfinished_recordings(options: Options) -> list[str]:
    """Return a line for each recording without a baseline that the next recording of the same code continues."""
    folder = _folder_of_code(options)
    lines = []
    for path in sorted(folder.glob("*/*.json")) if folder else ():
        try:
            kept = read_baseline_file(path)
        except AortaError as error:
            lines.append(f"ERROR {error}")
            continue
        launches = counted(len(kept.launches), "launch")
        lines += [
            f"not recorded yet: {kept.case}; {launches} kept",
            f"  next: to continue, run pytest {shlex.quote(kept.test)} --update-baselines; --cache-clear starts over",
        ]
    return lines


def write_new_baselines(records: Sequence[TestRecord], passed: Set[str], options: Options) -> tuple[list[str], bool]:
    """Write the new baselines of passed tests; return lines for the summary, and True if every write succeeded.

    If a test was retried, only its last attempt counts.

    The launches are merged with the current files under a lock, so that sessions that update the same baseline at once
    do not lose each other's launches.
    """
    notes: list[str] = []
    good = True
    new = [
        (record, comparison, comparison.new)
        for record in records
        for comparison in record.comparisons
        if comparison.new is not None and not record.is_retried
    ]
    for record, comparison, launches in new:
        platform, case = comparison.platform, comparison.case
        if record.nodeid not in passed:
            notes.append(f"not recorded, because the test {_ENDS.get(record.outcome, 'failed')}: {case}")
            continue
        try:
            with locked_baselines(options.baselines_dir):
                old = read_baseline(options.baselines_dir, platform, case)
                baseline = launches.merged(options.baselines_dir)
                write_baseline(options.baselines_dir, baseline)
            notes += [*_change_lines(old, baseline), *comparison.detection]
        except AortaError as error:
            notes.append(f"ERROR {error}")
            good = False
            # The next recording continues with launches that can't be written.
            if folder := _folder_of_code(options):
                with suppress(AortaError):  # the disk of the baselines may be that of the cache
                    write_baseline(folder, launches.baseline)
    return notes, good


def unused_baselines(
    records: Sequence[TestRecord], passed: Set[str], collected: set[str], options: Options
) -> list[str]:
    """Return a line for each baseline whose test does not exist, or passed without a comparison with the baseline.

    A test that can't launch has no record.
    """
    used: dict[str, set[str]] = {nodeid: set() for nodeid in passed}
    used |= {record.nodeid: _stored_cases(record) for record in records if record.nodeid in passed}
    platforms = {record.nodeid: record.platform for record in records}
    return orphans(options.baselines_dir, collected, used, platforms, options.rootdir)


def _stored_cases(record: TestRecord) -> set[str]:
    return {one.case for one in record.comparisons if one.kind is ReferenceKind.BASELINE}


def _noisy_text(case: str, problems: Sequence[str]) -> str:
    """Return why launches were not recorded as a baseline."""
    lines = [
        f"{case}: not recorded, because the launches are too noisy for a baseline:",
        *(f"  {problem}" for problem in problems),
    ]
    return "\n".join([*lines, "  next: to record it nevertheless, give a reason: --aorta-record='noisy:the reason'"])


def _change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Return the values of a written baseline before and after, metric by metric."""
    center = counted(len(new.center_launches), "launch")
    count = f"{center} in the center, {len(new.launches)} in total, revision {new.revision}"
    lines = [f"{'updated' if old else 'recorded'} {new.platform}: {new.case} ({count})"]
    for metric in METRICS.values():
        after, before = middle(metric, new.center_launches), middle(metric, old.center_launches) if old else None
        if after is None and before is None:
            continue
        shown = (format_value(value, metric.unit, exact=not metric.has_noise) for value in (before, after))
        text = f"  {metric.name}: {' -> '.join(shown)}"
        if isinstance(before, float) and isinstance(after, float) and before:
            text += f" ({(after - before) / abs(before):+.1%})"
        lines.append(text)
    if reason := new.forced.get(str(new.revision)):
        lines.append(f"  recorded although it is noisy: {reason}")
    return lines
