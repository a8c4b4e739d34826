"""Recording of baselines: launches of a new baseline, the files of passed tests, and unused baselines."""

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_aorta.common.errors import AortaError, BaselineError, ComparisonFailed
from pytest_aorta.common.text import counted
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import digest
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side, TestRecord
from pytest_aorta.session.rounds import comparison_text
from pytest_aorta.verdict.baseline import Baseline, locked_baselines, orphans, read_baseline, write_baseline
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.learning import (
    NewBaseline,
    are_undecided,
    detection_lines,
    left_out,
    merged,
    needs_another,
    refusal_of_left_out,
)
from pytest_aorta.verdict.metrics import METRICS, Tolerance, format_value, middle
from pytest_aorta.verdict.noise import Priors, platform_priors
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
class Recording:
    """Launches that become a baseline if the test passes.

    Attributes:
        first: The first launch, as a baseline of its own.
        marked: The tolerances that markers set.
        options: The options of the run.
        old: The stored baseline; None if there is none.
        defaults: The default of each config key: a stored baseline that is older than a key was recorded with it.
    """

    first: Baseline
    marked: Mapping[str, Tolerance]
    options: Options
    old: Baseline | None
    defaults: Mapping[str, Any]

    @cached_property
    def _priors(self) -> Priors:
        device = self.first.center_launches[0].device
        return platform_priors(self.options.baselines, self.first.platform, device, self.first.case)

    @property
    def _stored(self) -> Baseline | None:
        return self.old and self.old.replace(config={**self.defaults, **self.old.config})

    def launched(self) -> Generator[Side, LaunchFacts, tuple[Baseline, Verdicts]]:
        """Ask for as many launches as a baseline needs, like a comparison of :mod:`pytest_aorta.session.rounds`.

        Returns:
            The launches as a baseline of their own, and its comparison with itself.

        Raises:
            BaselineError: The launches ran under a profiler or with a planted fault.
            ComparisonFailed: A metric is missing in a launch.
        """
        case, config, options, (facts,) = self.first.case, self.first.config, self.options, self.first.center_launches
        if config.get(TEST_HOOK_KEY, {}) not in ({}, None):
            raise BaselineError(f"{case}: not recorded: the config plants a {TEST_HOOK_KEY}")
        if profiler := facts.profiler:
            raise BaselineError(f"{case}: not recorded: ranks ran under {profiler}, which slows them; record without")
        first = self.first.replace(config=identity(config))
        launches, baseline = [facts], first
        old = None if options.record.replaces else self._stored
        while needs_another(baseline, self.marked, self._priors, options) or (
            old and len(launches) < options.launches and are_undecided(old, baseline, self.marked, self._priors)
        ):
            launches.append((yield Side.CANDIDATE))
            baseline = first.of_launches(launches)
        noisy = left_out(launches, self.marked)
        if options.record.reason is None:
            baseline = baseline.replace(left_out=noisy)
        elif noisy:
            baseline = baseline.replace(forced={str(baseline.revision): options.record.reason})
        # Comparing the baseline with itself shows metrics that are missing or differ between launches.
        itself = StoredComparison(case, first.config, baseline, self.marked, self._priors, len(launches))
        verdicts = itself.judge(launches)
        failing = verdicts.failing({Outcome.MISSING})
        if failing := [row for row in failing if row.not_applicable is not Reason.NOISY]:
            compared = tuple(ComparedLaunch(Side.CANDIDATE, launch) for launch in launches)
            recorded_now = Comparison(case, platform=first.platform, workload=first.workload, launches=compared)
            raise ComparisonFailed(comparison_text(recorded_now, failing))
        return baseline, verdicts

    def merged(self, new: Baseline) -> NewBaseline:
        """Return the launches merged with the stored baseline.

        Raises:
            BaselineError: The launches can't be added, or are too noisy for a metric that a marker names.
        """
        marked, priors, options = self.marked, self._priors, self.options
        baseline = merged(self._stored, new, marked, priors, options.record.replaces).condensed()
        if refusal := refusal_of_left_out(baseline, marked, options, priors):
            reason = f"not recorded, because the launches can't hold what a marker names:\n{refusal}"
            raise BaselineError(f"{new.case}: {reason}")
        lines = detection_lines(baseline, marked, priors, options.max_launches)
        return NewBaseline(baseline, digest(self.old), tuple(lines))


def write_new_baselines(records: Sequence[TestRecord], passed: Set[str], options: Options) -> tuple[list[str], bool]:
    """Write the new baselines of passed tests; return lines for the summary, and True if every write succeeded.

    If a test was retried, only its last attempt counts.

    A file that another session has written since a test merged its launches with it stays as it is.
    """
    notes: list[str] = []
    good = True
    folder = options.baselines
    final = [record for record in records if not record.is_retried]
    compared = [(record, comparison.new) for record in final for comparison in record.comparisons]
    for tested, new in compared:
        if new is None:
            continue
        baseline = new.baseline
        if tested.nodeid not in passed:
            notes.append(f"not recorded, because the test {_ENDS.get(tested.outcome, 'failed')}: {baseline.case}")
            continue
        try:
            with locked_baselines(folder):
                old = read_baseline(folder, baseline.platform, baseline.case)
                if digest(old) != new.before:
                    changed = "not recorded, because another run has changed the baseline meanwhile; record again"
                    raise BaselineError(f"{baseline.case}: {changed}")
                write_baseline(folder, baseline)
            notes += [*change_lines(old, baseline), *new.detection]
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
    found = orphans(options.baselines, collected, used, platforms, options.rootdir)
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
