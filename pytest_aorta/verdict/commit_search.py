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
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean, variance

from pytest_aorta.common.model import Model
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import is_not_profiled_again, not_profiled
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Metric, MetricKind, Tolerance, metric_of
from pytest_aorta.verdict.noise import transformed_values
from pytest_aorta.verdict.statistics.bisection import (
    Posterior,
    Suspects,
    is_confirmed,
    next_commit,
    posterior_of_bits,
    posterior_of_pairs,
    suspects,
)
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
# A tolerance that a message proposes.
_EXAMPLE = 0.05


class SearchOutcome(StrEnum):
    """The outcome of a search."""

    FOUND = "found"
    ABSENT = "absent"
    """The ends do not differ."""
    UNDECIDED = "undecided"


class Probe(Model, frozen=True, tag_field="kind", tag="probe"):
    """A launch of a commit, in a pair with a launch of another commit unless only bits are compared.

    Attributes:
        reference: The launch of the other commit: the good commit, or ``before``.
        before: Number of the commit before ``commit`` that starts, if the pair confirms that ``commit`` brought the
            change in.
    """

    commit: int
    candidate: LaunchFacts
    reference: LaunchFacts | None
    before: int | None = None


@dataclass(frozen=True)
class NextLaunch:
    """The launch to make next.

    Attributes:
        commit: Number of the commit to launch.
        paired: Whether another commit is launched too: the good commit, or ``before``.
        candidate_first: Whether the commit is launched before the other one. The order alternates, so that a drift of
            the machine affects both sides equally.
        before: Number of the commit before ``commit`` that starts, if the pair confirms that ``commit`` brought the
            change in.
    """

    commit: int
    paired: bool = False
    candidate_first: bool = True
    before: int | None = None


class ProbedCommit(Model, frozen=True):
    """A row of the table of probes.

    Attributes:
        launches: Number of launches of the commit.
        change: Mean change against the good commit on the metric's scale, e.g. 0.05 for 5%; None if bits are compared
            or if the commit has no pair.
        probability: Probability that the commit has the change.
        detail: Why the commit was skipped, or a remark; else empty.
    """

    commit: int
    launches: int
    change: float | None
    probability: float
    detail: str = ""


class SearchEnd(Model, frozen=True, tag_field="kind", tag="end"):
    """The end of a search.

    Attributes:
        reason: Explanation of an outcome other than *found*.
        suspects: Numbers of the commits that may have introduced the change; empty if the search can't name any.
        probability: Probability that the first commit with the change is one of ``suspects``.
        metric: The metric that was searched; empty if the ends do not differ.
        change, low, high: The change on the metric's scale with its 95% interval; None without suspects, or if bits are
            compared.
        num_confirming: Number of pairs that confirm the named commit; 0 if it is not confirmed or bits are compared.
        probed: Every commit that was launched or skipped, in order.
        verdicts: The comparison of the ends.
        notes: Remarks.
    """

    outcome: SearchOutcome
    reason: str = ""
    suspects: tuple[int, ...] = ()
    probability: float = 0.0
    metric: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    num_confirming: int = 0
    probed: tuple[ProbedCommit, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Aim:
    """The metric that is searched, because it differs between the ends in ``row``.

    Attributes:
        metric: The metric.
        is_exact: Whether the metric is searched without noise.
    """

    row: Verdict
    metric: Metric
    is_exact: bool

    @property
    def least_change(self) -> float:
        """Return half of the tolerance, or of a change of the ends that is smaller."""
        row = self.row
        least = self.metric.scale.difference(min(row.tolerance.value or 0.0, abs(row.delta or 0.0))) / 2
        return -least if row.outcome is Outcome.IMPROVED else least

    def varies(self) -> str:
        """Return why launches of one commit do not agree on a metric that is searched without noise."""
        metric = metric_of(self.row.metric)
        if self.row.missing is not None:
            return f"{metric.name} is missing in some launches of one commit, but not in all of them"
        if metric.kind in (MetricKind.TIMING, MetricKind.MEMORY):
            example = Tolerance(_EXAMPLE, metric.scale)
            return (
                f"{metric.name} varies between launches of one commit, but has to be equal bit for bit; give a "
                f"tolerance, such as --tolerance {metric.name}={example}"
            )
        return f"{metric.name} differs between launches of one commit; run the test in its deterministic mode"

    def transformed(self, probe: Probe) -> tuple[float | None, float | None]:
        """Return the transformed value of both launches of a pair; None for a launch without one."""
        if probe.reference is None:
            return None, None
        here, there = transformed_values(self.metric, [probe.candidate, probe.reference], [probe.reference])
        return here, there

    def differences(self, probes: Sequence[Probe]) -> dict[int, list[float]]:
        """Return how much worse each commit is than the good one, as differences of transformed values by number."""
        found: dict[int, list[float]] = defaultdict(list)
        for probe in probes:
            here, there = self.transformed(probe)
            if here is not None and there is not None:
                found[probe.commit].append(self.metric.worse * (here - there))
        return dict(found)

    def shown_change(self, worse_by: float) -> float:
        """Return a difference of transformed values as a change on the metric's scale."""
        return self.metric.scale.change(self.metric.worse * worse_by)


def _metric(row: Verdict) -> Metric:
    return metric_of(row.metric, row.tolerance.direction)


def _is_exact(row: Verdict) -> bool:
    return row.outcome is Outcome.MISSING or row.tolerance.is_exact or not _metric(row).has_noise


def _aim_of(rows: Sequence[Verdict]) -> _Aim | None:
    """Return the metric to search: one without noise if there is one, else the metric with the clearest change."""
    exact = next(filter(_is_exact, rows), None)
    row = exact or max((row for row in rows if row.delta is not None), key=_clearness, default=None)
    if row is None:
        return None
    return _Aim(row, _metric(row), exact is not None)


def _clearness(row: Verdict) -> float:
    if row.delta is None or row.low is None or row.high is None:
        return 0.0
    return abs(row.delta) / max(row.high - row.low, 1e-12)


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
        self._aim: _Aim | None = None
        self._num_end_pairs = 0

    def add(self, probe: Probe) -> None:
        """Add the launches that :meth:`next` asked for; a commit whose launch can't be compared is skipped."""
        is_of_ends = self._needs_ends
        self._probes.append(probe)
        if is_of_ends:
            candidates = [probe.candidate for probe in self._probes]
            references = [probe.reference for probe in self._probes if probe.reference is not None]
            self._num_end_pairs = len(self._probes)
            self._ends = self._comparison.judge(candidates, references, self._ends.decided if self._ends else None)
            self._aim = None if self._needs_ends else _aim_of(self._changed())
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
        return self._next_of_bits(self._aim) if self._aim.is_exact else self._next_of_pairs(self._aim)

    @property
    def _needs_ends(self) -> bool:
        if self._ends is None or self._ends.need_launches:
            return True
        return len(self._probes) < MIN_LAUNCHES_OF_BITS and any(map(_is_exact, self._changed()))

    def _changed(self) -> list[Verdict]:
        """Return the metrics that got worse or were lost between the ends, or else those that got better."""
        assert self._ends is not None
        first = self._probes[0]
        sides = [launch for launch in (first.candidate, first.reference) if launch is not None]
        worse = [
            row
            for row in self._ends.failing({Outcome.MISSING})
            if any(_metric(row).measure(side) is not None for side in sides)
        ]
        return worse or [row for row in self._ends.rows if row.outcome is Outcome.IMPROVED]

    def _incomparable(self, aim: _Aim, probe: Probe) -> Iterator[tuple[int, str]]:
        """Yield each commit of a probe whose launch can't be compared, and the reason.

        A commit whose host was late is not among them, since its next launch can have the metric.
        """
        if aim.row.missing is not None:
            return
        if aim.is_exact:
            row = self._row_of_bits(aim, probe)
            if row is not None and row.outcome in (Outcome.NOT_APPLICABLE, Outcome.INCONCLUSIVE):
                yield probe.commit, f"{aim.row.metric} can't be compared: {row.detail}"
        elif probe.reference is not None:
            metric = aim.metric
            sides = ((probe.commit, probe.candidate), (probe.before or 0, probe.reference))
            for (commit, launch), value in zip(sides, aim.transformed(probe), strict=True):
                if value is None and (is_not_profiled_again(launch) or not not_profiled(metric, launch)):
                    yield commit, f"has no {aim.row.metric}"

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

    def _next_of_bits(self, aim: _Aim) -> NextLaunch | SearchEnd:
        found: dict[int, list[bool]] = defaultdict(list)
        for probe in self._usable():
            found[probe.commit].append(self._has_other_bits(aim, probe))
        goods = {aim.metric.measure(probe.reference) for probe in self._probes if probe.reference is not None}
        does_vary = any(len(set(values)) > 1 for values in found.values()) or (
            aim.row.missing is None and len(goods) > 1
        )
        if does_vary or not found[self._count][0]:
            return self._end(SearchOutcome.UNDECIDED, aim, posterior_of_bits(self._count, {}), None, aim.varies())
        changed = {commit: values[0] for commit, values in found.items()}
        posterior = posterior_of_bits(self._count, changed)
        best = _likeliest(posterior, self._skipped)
        if best.probability >= CONFIDENCE:
            # Bits that only most launches of a commit have would lead to a wrong commit.
            few = [commit for commit in _beside(best) if len(found[commit]) < MIN_LAUNCHES_OF_BITS]
            return NextLaunch(few[0]) if few else self._end(SearchOutcome.FOUND, aim, posterior, best)
        begin = max((commit for commit, has_it in changed.items() if not has_it), default=0)
        end = min(commit for commit, has_it in changed.items() if has_it)
        return NextLaunch(next_commit(posterior, self._skipped, range(begin + 1, end)))

    def _has_other_bits(self, aim: _Aim, probe: Probe) -> bool:
        """Return whether a launch differs from the good commit as the bad one does: in bits, or in what it lacks."""
        row = self._row_of_bits(aim, probe)
        if row is None:
            return False
        return row.outcome is not Outcome.PASS if aim.row.missing is None else row.missing is aim.row.missing

    def _row_of_bits(self, aim: _Aim, probe: Probe) -> Verdict | None:
        """Return the verdict of a launch against the good commit; None if both lack the metric."""
        reference = probe.reference or self._probes[0].reference
        assert reference is not None
        rows = self._comparison.judge([probe.candidate], [reference]).rows
        return next((row for row in rows if row.metric == aim.row.metric), None)

    def _next_of_pairs(self, aim: _Aim) -> NextLaunch | SearchEnd:
        differences = aim.differences(self._usable())
        posterior = posterior_of_pairs(
            self._count, differences, self._comparison.variance(aim.metric).within, aim.least_change
        )
        best = _likeliest(posterior, self._skipped)
        if posterior.none >= CONFIDENCE:
            reason = f"the ends do not differ: further pairs of the bad commit have no change of {aim.row.metric}"
            return self._end(SearchOutcome.ABSENT, aim, posterior, None, reason)
        is_likely = best.probability >= CONFIDENCE
        few = self._with_few_pairs(aim, best) if is_likely else []
        pairs = self._confirming(aim, best) if is_likely and not few else []
        answer = is_confirmed(pairs)
        if answer:
            return self._end(SearchOutcome.FOUND, aim, posterior, best).replace(num_confirming=len(pairs))
        if answer is False:
            reason = f"{counted(len(pairs), 'pair')} of the likeliest commit and the one before did not confirm it"
            return self._end(SearchOutcome.UNDECIDED, aim, posterior, best, reason)
        if len(self._probes) >= self._max_probes:
            reason = f"{counted(len(self._probes), 'pair')} did not decide; measure more steps in each launch"
            return self._end(SearchOutcome.UNDECIDED, aim, posterior, best, reason)
        if not is_likely:
            return self._pair(next_commit(posterior, self._skipped))
        return self._pair(few[0]) if few else self._pair(best.commits[-1], before=best.commits[0] - 1)

    def _confirming(self, aim: _Aim, best: Suspects) -> list[tuple[float, float]]:
        """Return the metric in the pairs that confirm a commit: in the commit, and in the one before.

        Larger values are worse, or better if the ends show an improvement.
        """
        sides = best.commits[-1], best.commits[0] - 1
        probes = [probe for probe in self._probes if (probe.commit, probe.before) == sides]
        references = [probe.reference for probe in probes if probe.reference is not None]
        if not references:
            return []
        sign = aim.metric.worse * math.copysign(1.0, aim.least_change)
        named = transformed_values(aim.metric, [probe.candidate for probe in probes], references)
        before = transformed_values(aim.metric, references, references)
        return [
            (sign * here, sign * there)
            for here, there in zip(named, before, strict=True)
            if here is not None and there is not None
        ]

    def _with_few_pairs(self, aim: _Aim, best: Suspects) -> list[int]:
        """Return the commits on either side of the change that have too few pairs.

        The pairs of the ends do not count: they were repeated until they showed a change, so they exaggerate it.
        """
        fresh = aim.differences(self._usable(self._num_end_pairs))
        return [commit for commit in _beside(best) if len(fresh.get(commit, ())) < MIN_PAIRS]

    def _usable(self, begin: int = 0) -> list[Probe]:
        """Return the probes, from number ``begin`` on, of commits that start, without pairs that confirm a commit."""
        return [probe for probe in self._probes[begin:] if probe.commit not in self._skipped and probe.before is None]

    def _pair(self, commit: int, before: int | None = None) -> NextLaunch:
        return NextLaunch(commit, paired=True, candidate_first=len(self._probes) % 2 == 1, before=before)

    def _end(
        self, outcome: SearchOutcome, aim: _Aim, posterior: Posterior, best: Suspects | None, reason: str = ""
    ) -> SearchEnd:
        differences = {} if aim.is_exact else aim.differences(self._usable())
        end = SearchEnd(
            outcome,
            reason,
            metric=aim.row.metric,
            probed=tuple(self._table(aim, posterior, differences)),
            verdicts=() if self._ends is None else self._ends.rows,
            notes=tuple(self._notes(aim)),
        )
        if best is None:
            return end
        end = end.replace(suspects=best.commits, probability=best.probability)
        if aim.is_exact:
            return end
        low, high = sorted(aim.shown_change(edge) for edge in (posterior.low, posterior.high))
        return end.replace(change=aim.shown_change(posterior.change), low=low, high=high)

    def _table(
        self, aim: _Aim, posterior: Posterior, differences: Mapping[int, Sequence[float]]
    ) -> Iterator[ProbedCommit]:
        launches = Counter(probe.commit for probe in self._probes)
        launches.update(probe.before for probe in self._probes if probe.before)
        details = _parts(differences, posterior.change) | self._skipped
        for commit in sorted(launches.keys() | self._skipped.keys()):
            values = differences.get(commit)
            yield ProbedCommit(
                commit,
                launches[commit],
                aim.shown_change(mean(values)) if values else None,
                posterior.has_change(commit),
                details.get(commit, ""),
            )

    def _notes(self, aim: _Aim) -> Iterator[str]:
        if others := [row.metric for row in self._changed() if row.metric != aim.row.metric]:
            yield f"the ends also differ in {', '.join(others)}; search one of them with --metric"


def _beside(best: Suspects) -> list[int]:
    """Return the commits on either side of the change, without the good commit."""
    return [best.commits[-1], *([best.commits[0] - 1] if best.commits[0] > 1 else [])]


def _likeliest(posterior: Posterior, skipped: Collection[int]) -> Suspects:
    return max(suspects(posterior, skipped), key=lambda group: group.probability)


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
