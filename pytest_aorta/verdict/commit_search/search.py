"""The search for the commit that changed a metric: which launch is next, and when the search ends.

Commit 0 is the good commit, and the last commit is the bad one. First the search compares these two ends in pairs of
launches, like an A/B. If the metric has no noise, the search then compares bits, with one launch per probe, and a
second launch of the commits beside the change. If the metric has noise, each probe pairs a commit with the good commit,
until the posterior names a commit. Pairs of this commit and the one before then confirm it. Pure: this module reads no
file and no clock, and launches nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean, variance

from pytest_aorta.common.text import counted
from pytest_aorta.verdict.applicability import is_not_profiled_again, not_profiled
from pytest_aorta.verdict.commit_search.aim import chosen, is_exact, least_change, part_notes, searched, varies
from pytest_aorta.verdict.commit_search.probes import (
    NextLaunch,
    Probe,
    ProbedCommit,
    SearchEnd,
    SearchOutcome,
    differences_of,
    transformed,
)
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import METRICS, Metric
from pytest_aorta.verdict.noise.priors import transformed_values
from pytest_aorta.verdict.statistics.bisection import (
    Posterior,
    Suspects,
    next_commit,
    posterior_of_bits,
    posterior_of_pairs,
    suspects,
)
from pytest_aorta.verdict.statistics.confirmation import is_confirmed
from pytest_aorta.verdict.statistics.decision import Outcome, quantile_t
from pytest_aorta.verdict.verdicts import Verdict, Verdicts

# Probability at which a commit is named.
CONFIDENCE = 0.99
# The most pairs that compare the ends, and the most pairs of a whole search.
MAX_END_PAIRS = 12
MAX_PROBES = 100
# A single disturbed launch must not decide, so the named commit and the one before have three further pairs each.
MIN_PAIRS = 3
# Pairs of the ends if bits are compared, and launches of the commits beside the change: two show whether bits differ
# from launch to launch.
MIN_LAUNCHES_OF_BITS = 2
# Probability of a false note that a commit has only a part of the change.
_PART_RATE = 1e-3


class CommitSearch:
    """A search for one comparison of a test. The same launches in the same order always lead to the same end."""

    def __init__(self, num_commits: int, comparison: PairedComparison, *, max_probes: int = MAX_PROBES) -> None:
        """Search commits 1 to ``num_commits`` for a change that ``comparison`` finds between commit 0 and the last."""
        self._count = num_commits
        self._comparison = comparison
        self._max_probes = max_probes
        self._skipped: dict[int, str] = {}
        self._probes: list[Probe] = []
        self._ends: Verdicts | None = None
        self._aim: Verdict | None = None
        self._num_end_pairs = 0

    def add(self, probe: Probe) -> None:
        """Add the launches that :meth:`next` asked for; a commit whose launch can't be compared is skipped."""
        is_of_ends = self._needs_ends
        self._probes.append(probe)
        if is_of_ends:
            self._judge_ends()
        elif self._aim is not None:
            for commit, reason in self._incomparable(self._aim, probe):
                self.skip(commit, reason)

    def skip(self, commit: int, reason: str) -> None:
        """Leave out a commit that does not start. The good and the bad commit can't be left out."""
        if commit not in (0, self._count):
            self._skipped[commit] = reason

    def next(self) -> NextLaunch | SearchEnd:
        """Return the next launch, or the end of the search."""
        if self._needs_ends:
            return self._pair(self._count)
        if self._aim is None:
            return self._without_aim()
        return self._next_of_bits(self._aim) if is_exact(self._aim) else self._next_of_pairs(self._aim)

    @property
    def _needs_ends(self) -> bool:
        if self._ends is None or self._ends.need_launches:
            return True
        return len(self._probes) < MIN_LAUNCHES_OF_BITS and any(map(is_exact, self._changed()))

    def _changed(self) -> list[Verdict]:
        """Return the metrics that got worse or were lost between the ends, or else those that got better."""
        assert self._ends is not None
        worse = [row for row in self._ends.failing({Outcome.MISSING}) if self._is_at_an_end(row)]
        return worse or [row for row in self._ends.rows if row.outcome is Outcome.IMPROVED]

    def _is_at_an_end(self, row: Verdict) -> bool:
        first = self._probes[0]
        sides = [launch for launch in (first.candidate, first.reference) if launch is not None]
        return any(METRICS[row.metric].measure(side) is not None for side in sides)

    def _judge_ends(self) -> None:
        references = [probe.reference for probe in self._probes if probe.reference is not None]
        candidates = [probe.candidate for probe in self._probes]
        self._num_end_pairs = len(self._probes)
        self._ends = self._comparison.judge(candidates, references, self._ends.decided if self._ends else None)
        if not self._needs_ends:
            self._aim = chosen(self._changed())

    def _incomparable(self, aim: Verdict, probe: Probe) -> Iterator[tuple[int, str]]:
        """Yield each commit of a probe whose launch can't be compared, and the reason.

        A commit whose host was late is not among them, since its next launch can have the metric.
        """
        if aim.missing is not None:
            return
        if is_exact(aim):
            row = self._row_of_bits(aim, probe)
            if row is not None and row.outcome not in (Outcome.PASS, Outcome.REGRESSION, Outcome.MISSING):
                yield probe.commit, f"{aim.metric} can't be compared: {row.detail}"
        elif probe.reference is not None:
            metric = searched(aim)
            sides = ((probe.commit, probe.candidate), (probe.before or 0, probe.reference))
            for (commit, launch), value in zip(sides, transformed(metric, probe), strict=True):
                if value is None and (is_not_profiled_again(launch) or not not_profiled(metric, launch)):
                    yield commit, f"has no {aim.metric}"

    def _without_aim(self) -> SearchEnd:
        assert self._ends is not None
        rows, pairs = self._ends.rows, counted(len(self._probes), "pair")
        undecided = [row.metric for row in rows if row.outcome is Outcome.INCONCLUSIVE]
        without_scale = [row.metric for row in self._changed()]
        absent = [row.metric for row in rows if row.outcome is Outcome.MISSING]
        if undecided:
            reason = f"{', '.join(undecided)}: too noisy to distinguish the ends in {pairs}; measure more steps"
        elif absent:
            reason = f"{', '.join(absent)}: neither end has it"
        elif without_scale:
            reason = f"{', '.join(without_scale)}: differs between the ends, but has no scale to search on"
        elif all(row.outcome is Outcome.NOT_APPLICABLE for row in rows):
            reason = "no metric of the ends can be compared"
        else:
            return SearchEnd(SearchOutcome.ABSENT, f"the ends do not differ ({pairs})", verdicts=rows)
        return SearchEnd(SearchOutcome.UNDECIDED, reason, verdicts=rows)

    def _next_of_bits(self, aim: Verdict) -> NextLaunch | SearchEnd:
        found: dict[int, list[bool]] = defaultdict(list)
        for probe in self._usable():
            found[probe.commit].append(self._has_other_bits(aim, probe))
        goods = {METRICS[aim.metric].measure(probe.reference) for probe in self._probes if probe.reference is not None}
        does_vary = any(len(set(values)) > 1 for values in found.values()) or (aim.missing is None and len(goods) > 1)
        if does_vary or not found[self._count][0]:
            return self._end(SearchOutcome.UNDECIDED, aim, posterior_of_bits(self._count, {}), None, varies(aim))
        changed = {commit: values[0] for commit, values in found.items()}
        posterior = posterior_of_bits(self._count, changed)
        best = _likeliest(posterior, self._skipped)
        if best.probability >= CONFIDENCE:
            # Bits that only most launches of a commit have would lead to a wrong commit.
            few = [commit for commit in _beside(best) if len(found[commit]) < MIN_LAUNCHES_OF_BITS]
            return _alone(few[0]) if few else self._end(SearchOutcome.FOUND, aim, posterior, best)
        begin = max((commit for commit, has_it in changed.items() if not has_it), default=0)
        end = min(commit for commit, has_it in changed.items() if has_it)
        return _alone(next_commit(posterior, self._skipped, range(begin + 1, end)))

    def _has_other_bits(self, aim: Verdict, probe: Probe) -> bool:
        """Return whether a launch differs from the good commit as the bad one does: in bits, or in what it lacks."""
        row = self._row_of_bits(aim, probe)
        if row is None:
            return False
        return row.outcome is not Outcome.PASS if aim.missing is None else row.missing is aim.missing

    def _row_of_bits(self, aim: Verdict, probe: Probe) -> Verdict | None:
        """Return the verdict of a launch against the good commit; None if both lack the metric."""
        reference = probe.reference or self._probes[0].reference
        assert reference is not None
        rows = self._comparison.judge([probe.candidate], [reference]).rows
        return next((row for row in rows if row.metric == aim.metric), None)

    def _next_of_pairs(self, aim: Verdict) -> NextLaunch | SearchEnd:
        metric = searched(aim)
        differences = differences_of(metric, self._usable())
        posterior = posterior_of_pairs(
            self._count, differences, self._comparison.variance(metric).within, least_change(metric, aim)
        )
        best = _likeliest(posterior, self._skipped)
        if posterior.none >= CONFIDENCE:
            reason = f"the ends do not differ: further pairs of the bad commit have no change of {aim.metric}"
            return self._end(SearchOutcome.ABSENT, aim, posterior, None, reason)
        is_likely = best.probability >= CONFIDENCE
        few = self._with_few_pairs(metric, best) if is_likely else []
        pairs = self._confirming(metric, aim, best) if is_likely and not few else []
        answer = is_confirmed(pairs)
        if answer:
            return replace(self._end(SearchOutcome.FOUND, aim, posterior, best), num_confirming=len(pairs))
        if answer is False:
            reason = f"{counted(len(pairs), 'pair')} of the likeliest commit and the one before did not confirm it"
            return self._end(SearchOutcome.UNDECIDED, aim, posterior, best, reason)
        if len(self._probes) >= self._max_probes:
            reason = f"{counted(len(self._probes), 'pair')} did not decide; measure more steps in each launch"
            return self._end(SearchOutcome.UNDECIDED, aim, posterior, best, reason)
        if not is_likely:
            return self._pair(next_commit(posterior, self._skipped))
        return self._pair(few[0]) if few else self._pair(best.commits[-1], before=best.commits[0] - 1)

    def _confirming(self, metric: Metric, aim: Verdict, best: Suspects) -> list[tuple[float, float]]:
        """Return the metric in the pairs that confirm a commit: in the commit, and in the one before.

        Larger values are worse, or better if the ends show an improvement.
        """
        sides = best.commits[-1], best.commits[0] - 1
        probes = [probe for probe in self._probes if (probe.commit, probe.before) == sides]
        references = [probe.reference for probe in probes if probe.reference is not None]
        if not references:
            return []
        sign = metric.worse * math.copysign(1.0, least_change(metric, aim))
        named = transformed_values(metric, [probe.candidate for probe in probes], references)
        before = transformed_values(metric, references, references)
        return [
            (sign * here, sign * there)
            for here, there in zip(named, before, strict=True)
            if here is not None and there is not None
        ]

    def _with_few_pairs(self, metric: Metric, best: Suspects) -> list[int]:
        """Return the commits on either side of the change that have too few pairs.

        The pairs of the ends do not count: they were repeated until they showed a change, so they exaggerate it.
        """
        fresh = differences_of(metric, self._usable(self._num_end_pairs))
        return [commit for commit in _beside(best) if len(fresh.get(commit, ())) < MIN_PAIRS]

    def _usable(self, begin: int = 0) -> list[Probe]:
        """Return the probes, from number ``begin`` on, of commits that start, without pairs that confirm a commit."""
        return [probe for probe in self._probes[begin:] if probe.commit not in self._skipped and probe.before is None]

    def _pair(self, commit: int, before: int | None = None) -> NextLaunch:
        return NextLaunch(commit, paired=True, candidate_first=len(self._probes) % 2 == 1, before=before)

    def _end(
        self, outcome: SearchOutcome, aim: Verdict, posterior: Posterior, best: Suspects | None, reason: str = ""
    ) -> SearchEnd:
        metric = searched(aim)
        differences = {} if is_exact(aim) else differences_of(metric, self._usable())
        end = SearchEnd(
            outcome,
            reason,
            metric=aim.metric,
            probed=tuple(self._table(metric, posterior, differences)),
            verdicts=() if self._ends is None else self._ends.rows,
            notes=(*part_notes(aim), *self._other_metrics(aim)),
        )
        if best is None:
            return end
        end = replace(end, suspects=best.commits, probability=best.probability)
        if is_exact(aim):
            return end
        low, high = sorted(_shown_change(metric, edge) for edge in (posterior.low, posterior.high))
        return replace(end, change=_shown_change(metric, posterior.change), low=low, high=high)

    def _table(
        self, metric: Metric, posterior: Posterior, differences: Mapping[int, Sequence[float]]
    ) -> Iterator[ProbedCommit]:
        launches = Counter(probe.commit for probe in self._probes)
        launches.update(probe.before for probe in self._probes if probe.before)
        details = _parts(differences, posterior.change) | self._skipped
        for commit in sorted(launches.keys() | self._skipped.keys()):
            values = differences.get(commit)
            yield ProbedCommit(
                commit,
                launches[commit],
                _shown_change(metric, mean(values)) if values else None,
                posterior.has_change(commit),
                details.get(commit, ""),
            )

    def _other_metrics(self, aim: Verdict) -> list[str]:
        others = [row.metric for row in self._changed() if row.metric != aim.metric]
        return [f"the ends also differ in {', '.join(others)}; search one of them with --metric"] if others else []


def _alone(commit: int) -> NextLaunch:
    return NextLaunch(commit, paired=False, candidate_first=True)


def _beside(best: Suspects) -> list[int]:
    """Return the commits on either side of the change, without the good commit."""
    return [best.commits[-1], *([best.commits[0] - 1] if best.commits[0] > 1 else [])]


def _likeliest(posterior: Posterior, skipped: Collection[int]) -> Suspects:
    return max(suspects(posterior, skipped), key=lambda group: group.probability)


def _shown_change(metric: Metric, worse_by: float) -> float:
    return metric.scale.change(metric.worse * worse_by)


def _parts(differences: Mapping[int, Sequence[float]], change: float) -> dict[int, str]:
    """Return a remark for each commit that certainly has only a part of the change.

    The search assumes that a single commit changed the metric.
    """
    several = {commit: values for commit, values in differences.items() if len(values) >= MIN_PAIRS}
    df = sum(len(values) - 1 for values in several.values())
    if df == 0 or change == 0:
        return {}
    pooled = math.fsum(variance(values) * (len(values) - 1) for values in several.values()) / df
    found = {}
    for commit, values in several.items():
        error = quantile_t(1 - _PART_RATE, df) * math.sqrt(pooled / len(values))
        fraction = mean(values) / change
        if 0 < fraction < 1 and min(fraction, 1 - fraction) * abs(change) > error:
            found[commit] = f"{fraction:.0%} of the change: more than one commit changed the metric"
    return found
