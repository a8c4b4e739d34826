"""Recording of baselines: launches of a new baseline, the files of passed tests, and unused baselines."""

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_aorta.common.errors import AortaError, BaselineError, ComparisonFailed
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side, TestRecord
from pytest_aorta.session.rounds import comparison_text
from pytest_aorta.verdict.baseline import Baseline, locked_baselines, orphans, read_baseline, write_baseline
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.learning import (
    NewLaunches,
    detection_lines,
    left_out,
    needs_another,
    refusal_of_left_out,
)
from pytest_aorta.verdict.metrics import METRICS, Tolerance, format_value, middle
from pytest_aorta.verdict.noise import platform_priors
from pytest_aorta.verdict.rows import TEST_HOOK_KEY, identity
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Reason, ReferenceKind, Verdicts

# pytest's word for the outcome of a test that neither passed nor failed -> the outcome in words.
_ENDS = {
    "skipped": "was skipped after its comparison",
    "xfailed": "failed, as its mark xfail expects",
    "xpassed": "passed in spite of its mark xfail",
}


@dataclass(frozen=True)
class _Learned:
    """Launches that become a baseline if the test passes.

    Attributes:
        new: The launches, to be merged with the stored baseline.
        verdicts: The comparison of the new baseline with itself.
        detection: Lines on the changes that the baseline will detect.
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
        BaselineError: The launches ran under a profiler or with a planted fault, can't be added, or are too noisy for a
            metric that a marker names.
        ComparisonFailed: A metric is missing in a launch.
    """
    case, config, (facts,) = first.case, first.config, first.center_launches
    if config.get(TEST_HOOK_KEY, {}) not in ({}, None):
        raise BaselineError(f"{case}: not recorded: the config plants a {TEST_HOOK_KEY}")
    if profiler := facts.profiler:
        raise BaselineError(f"{case}: not recorded: ranks ran under {profiler}, which slows them; record without")
    first = first.replace(config=identity(config))
    launches, baseline = [facts], first
    new = partial(NewLaunches, marked=dict(marked), defaults=dict(defaults), fresh=options.recording.replaces)
    priors = platform_priors(options.baselines_dir, first.platform, facts.device, case)
    while needs_another(baseline, marked, priors, options) or (
        len(launches) < options.launches and new(baseline).are_undecided(options.baselines_dir)
    ):
        launches.append((yield Side.CANDIDATE))
        baseline = first.of_launches(launches)
    noisy = left_out(launches, marked)
    if options.recording.reason is None:
        baseline = baseline.replace(left_out=noisy)
    elif noisy:
        baseline = baseline.replace(forced={str(baseline.revision): options.recording.reason})
    # Comparing the baseline with itself shows metrics that are missing or differ between launches.
    verdicts = StoredComparison(case, first.config, baseline, marked, priors, len(launches)).judge(launches)
    failing = verdicts.failing({Outcome.MISSING})
    if failing := [row for row in failing if row.not_applicable is not Reason.NOISY]:
        compared = tuple(ComparedLaunch(Side.CANDIDATE, launch) for launch in launches)
        recorded_now = Comparison(case, platform=first.platform, workload=first.workload, launches=compared)
        raise ComparisonFailed(comparison_text(recorded_now, failing))
    # Merge now, so that launches that can't be added fail the test. They are merged again when the session ends,
    # since other sessions may have updated the baseline by then.
    stored = new(baseline).merged(options.baselines_dir)
    if refusal := refusal_of_left_out(stored, marked, options, priors):
        raise BaselineError(f"{case}: not recorded, because the launches can't hold what a marker names:\n{refusal}")
    return _Learned(new(baseline), verdicts, tuple(detection_lines(stored, marked, priors, options.max_launches)))


def write_new_baselines(records: Sequence[TestRecord], passed: Set[str], options: Options) -> tuple[list[str], bool]:
    """Write the new baselines of passed tests; return lines for the summary, and True if every write succeeded.

    If a test was retried, only its last attempt counts.

    The launches are merged with the current files under a lock, so that sessions that update the same baseline at once
    do not lose each other's launches.
    """
    notes: list[str] = []
    good = True
    final = [record for record in records if not record.is_retried]
    compared = [(record, comparison, comparison.new) for record in final for comparison in record.comparisons]
    for record, comparison, launches in compared:
        if launches is None:
            continue
        platform, case = comparison.platform, comparison.case
        if record.nodeid not in passed:
            notes.append(f"not recorded, because the test {_ENDS.get(record.outcome, 'failed')}: {case}")
            continue
        try:
            with locked_baselines(options.baselines_dir):
                old = read_baseline(options.baselines_dir, platform, case)
                baseline = launches.merged(options.baselines_dir)
                write_baseline(options.baselines_dir, baseline)
            notes += [*change_lines(old, baseline), *comparison.detection]
        except AortaError as error:
            notes.append(f"ERROR {error}")
            good = False
    return notes, good


def unused_baselines(
    records: Sequence[TestRecord], passed: Set[str], collected: set[str], options: Options
) -> list[str]:
    """Return a line for each baseline whose test does not exist, or passed without a comparison with the baseline.

    A test that can't launch has no record.
    """
    used: dict[str, set[str]] = {nodeid: set() for nodeid in passed}
    for record in records:
        if record.nodeid in passed:
            used[record.nodeid] = {one.case for one in record.comparisons if one.kind is ReferenceKind.BASELINE}
    platforms = {record.nodeid: record.platform for record in records}
    found = orphans(options.baselines_dir, collected, used, platforms, options.rootdir)
    return [line.removeprefix(f"{options.rootdir}/") for line in found]


def change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Return the values of a written baseline before and after, metric by metric."""
    launches = counted(len(new.center_launches), "launch")
    count = f"baseline {new.revision}: {launches}, {len(new.launches)} kept in all"
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
