"""Comparisons that ask for launches until they are final, and the text of one that failed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Iterable, Sequence
from statistics import median
from typing import TypeAlias, TypeVar

from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import Comparison, Side
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import MetricKind, metric_of
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import NotApplicable, Verdict, Verdicts

N = TypeVar("N")
R = TypeVar("R")
Comparing: TypeAlias = Generator[Side, LaunchFacts, Verdicts]


def settle(comparing: Generator[N, LaunchFacts, R], launch: Callable[[N], LaunchFacts]) -> R:
    """Give a comparison each launch that it asks for, and return what it returns.

    A failed launch is raised inside the comparison, which may go on without it.
    """
    try:
        need = next(comparing)
        while True:
            try:
                facts = launch(need)
            except AortaError as error:
                need = comparing.throw(error)
            else:
                need = comparing.send(facts)
    except StopIteration as end:
        found: R = end.value
        return found


def with_baseline(comparison: StoredComparison, first: LaunchFacts) -> Comparing:
    """Compare a first launch and further ones of the candidate with the stored baseline."""
    launches = [first]
    verdicts = comparison.judge(launches)
    while verdicts.need_launches:
        launches.append((yield Side.CANDIDATE))
        verdicts = comparison.judge(launches, verdicts.decided)
    return verdicts


def in_pairs(
    comparison: PairedComparison,
    candidates: Iterable[LaunchFacts] = (),
    references: Iterable[LaunchFacts] = (),
    *,
    reference_first: bool = False,
) -> Comparing:
    """Compare with an A/B reference, in pairs of adjacent launches whose order alternates.

    Args:
        comparison: The comparison.
        candidates, references: Launches that exist already, as many of each.
        reference_first: The order of the first pair.
    """
    launches = {Side.CANDIDATE: [*candidates], Side.REFERENCE: [*references]}
    verdicts: Verdicts | None = None
    while verdicts is None or verdicts.need_launches:
        if verdicts is not None or not launches[Side.CANDIDATE]:
            # Alternate the order, so that a drift of the machine affects both sides equally.
            candidate_first = (len(launches[Side.CANDIDATE]) % 2 == 0) is not reference_first
            for side in launches if candidate_first else reversed(launches):
                launches[side].append((yield side))
        verdicts = comparison.judge(
            launches[Side.CANDIDATE], launches[Side.REFERENCE], verdicts.decided if verdicts else None
        )
    return verdicts


def with_both(comparison: StoredComparison, first: LaunchFacts, version: str) -> Comparing:
    """Compare a first launch with the stored baseline, and in pairs with ``version`` what the baseline can't decide."""
    verdicts = comparison.judge([first])
    names = [row.metric for row in verdicts.rows if _is_for_pairs(row, comparison)]
    if not names:
        return verdicts
    most = comparison.max_launches
    pairs = PairedComparison(comparison.case, comparison.marked, comparison.variance, names, most, version)
    return joined(verdicts, (yield from in_pairs(pairs)))


def _is_for_pairs(row: Verdict, comparison: StoredComparison) -> bool:
    """Return True if an A/B can decide a verdict and the stored baseline can't."""
    # Pairs have less noise, so an A/B can decide what further launches against the stored baseline could not.
    if row.outcome is Outcome.INCONCLUSIVE and comparison.max_launches > 1:
        return True
    # The baseline comes from another machine, hour or launcher, or was too noisy.
    is_elsewhere = row.metric in comparison.marked or row.not_applicable is NotApplicable.NOISY
    return row.outcome is Outcome.NOT_APPLICABLE and is_elsewhere


def joined(stored: Verdicts, paired: Verdicts) -> Verdicts:
    """Return the stored verdicts, but the A/B's verdicts for the metrics that the A/B compared."""
    by_metric = {row.metric: row for row in paired.rows}
    rows = tuple(by_metric.get(row.metric, row) for row in stored.rows)
    return Verdicts(stored.case, rows, tuple(dict.fromkeys([*stored.notes, *paired.notes])))


_MAX_DETAILS = 8


def failed_checks_text(result: WorkloadResult) -> str:
    """Return the failed checks of a workload, with the first details in full."""
    first = result.failure_details[:_MAX_DETAILS]
    lines = [f"{result.workload}: {result.failure_count} of its own checks failed on {result.platform}"]
    lines += [f"  {detail}" for detail in first]
    if result.failure_count > len(first):
        lines.append(f"  ... and {result.failure_count - len(first)} more")
    return "\n".join(lines)


def comparison_text(comparison: Comparison, failing: Sequence[Verdict], test: str = "") -> str:
    """Return the failing verdicts, the notes on the launches, the baseline's file, and what to do next.

    The range of the ranks' step times is shown if a time fails.

    Metrics without a baseline share one line, which names the command that records it for ``test``, a node id.
    """
    where = f"{comparison.workload} on {comparison.platform}"
    unrecorded = [_unrecorded_line(verdict, test) for verdict in failing if verdict.remedy][:1]
    failing = [verdict for verdict in failing if not verdict.remedy]
    if not failing:
        return f"{where}: {unrecorded[0]}"
    launches = comparison.facts(Side.CANDIDATE)
    lines = [f"{where}, {launches[-1].num_steps} steps:"]
    lines += [f"  {line}" for line in (*failing, *unrecorded, *comparison.notes)]
    if any(metric_of(verdict.metric).kind is MetricKind.TIMING for verdict in failing):
        ranks = (
            median(launch.fastest_rank_p50_ms for launch in launches),
            median(launch.slowest_rank_p50_ms for launch in launches),
        )
        lines.append(f"  median step time by rank: {ranks[0]:.4g} to {ranks[1]:.4g} ms")
    if comparison.baseline and not unrecorded:
        lines.append(f"  baseline: {comparison.baseline}")
    return "\n".join([*lines, *(f"  next: {step}" for step in _next_steps(failing, comparison.baseline, test))])


_RECORD_AGAIN = "pytest {test} --update-baselines --aorta-record=replace"
_SIDE_BY_SIDE = "compare side by side: pytest {test} --aorta-ab=HEAD"
# The reason why a metric was not compared -> what makes it comparable, the surest first. A test's node id is inserted.
_REMEDIES = {
    NotApplicable.ENVIRONMENT: f"record again here: {_RECORD_AGAIN}",
    NotApplicable.VERSIONS: f"record again here: {_RECORD_AGAIN}",
    NotApplicable.LAUNCHER: f"record again with this launcher: {_RECORD_AGAIN}",
    NotApplicable.NOISY: _SIDE_BY_SIDE,
    NotApplicable.OLD_CPU_TIMES: _SIDE_BY_SIDE,
    NotApplicable.NOT_REPRODUCIBLE: "call torch.manual_seed(0) and torch.use_deterministic_algorithms(True) before the "
    f"model is built, then record again: {_RECORD_AGAIN}",
    NotApplicable.UNMARKED_CPU_TIMES: f"add @pytest.mark.tolerance(step_time_p50='10%') and {_SIDE_BY_SIDE}",
    NotApplicable.HEAD_START: "add @pytest.mark.tolerance(step_time_mean='5%')",
    NotApplicable.TRACE: "profile fewer steps",
}


def nothing_text(comparison: Comparison, test: str) -> str:
    """Return why a comparison compared nothing, and the one step that makes it compare."""
    head = f"{comparison.workload} on {comparison.platform}: nothing compared"
    rows = comparison.rows
    if not rows:
        return f"{head}: no metric has a tolerance, and the launch has no weight hash; name one in a marker tolerance"
    lines = [f"{head}:", *(f"  {row.metric}: {row.detail}" for row in rows)]
    steps = _to_compare(rows, test) if comparison.baseline else []
    return "\n".join([*lines, *(f"  next: {step}" for step in steps)])


def _to_compare(rows: Sequence[Verdict], test: str) -> list[str]:
    """Return the surest step that makes a metric comparable; empty if each metric was compared."""
    reasons = {row.not_applicable for row in rows}
    steps = [text.format(test=shlex.quote(test)) for reason, text in _REMEDIES.items() if reason in reasons]
    return steps[:1]


def _unrecorded_line(verdict: Verdict, test: str) -> str:
    where = f" in {verdict.reference.name}" if verdict.reference.revision is None else ""
    return f"{verdict.detail}{where}; {verdict.remedy} with: pytest {shlex.quote(test)} --update-baselines"


def _next_steps(failing: Sequence[Verdict], baseline: str, test: str) -> list[str]:
    present = [verdict for verdict in failing if not verdict.is_lost]
    outcomes = {verdict.outcome for verdict in present}
    paired = not baseline or any(verdict.is_by_ab for verdict in present)
    steps = _to_compare(present, test) if baseline else []
    if baseline and outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}:
        steps.append("if it is intended, run --update-baselines --aorta-record=replace and say why in the commit")
    if Outcome.INCONCLUSIVE in outcomes:
        steps.append("allow more launches (--aorta-max-launches=12), measure more steps, or widen the tolerance")
    # An A/B in one session block adds nothing for metrics without noise, which have no delta.
    if not paired and any(verdict.delta is not None for verdict in present):
        steps.append("if in doubt, compare with another version side by side: --aorta-ab=main (any git ref)")
    return steps
