"""Text of failures, totals and changed baselines."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import METRICS, Direction, MetricKind, format_value, middle
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import FINDINGS, Verdict

_MAX_DETAILS = 8


def failed_checks_text(result: WorkloadResult) -> str:
    """Return the failed checks of a workload, with the first details in full."""
    first = result.failure_details[:_MAX_DETAILS]
    lines = [f"{result.workload}: {result.failure_count} of its own checks failed on {result.platform}"]
    lines += [f"  {detail}" for detail in first]
    if result.failure_count > len(first):
        lines.append(f"  ... and {result.failure_count - len(first)} more")
    return "\n".join(lines)


def comparison_text(
    failing: Sequence[Verdict],
    result: WorkloadResult,
    launches: Sequence[LaunchFacts],
    baseline: Path | None,
    notes: Sequence[str] = (),
    test: str = "",
) -> str:
    """Return the failing verdicts, the notes on the launches, the baseline's file, and what to do next.

    The range of the ranks' step times is shown if a time fails.

    Metrics without a baseline share one line, which names the command that records it for ``test``, a node id.
    """
    unrecorded = [_unrecorded_line(verdict, test) for verdict in failing if verdict.remedy][:1]
    failing = [verdict for verdict in failing if not verdict.remedy]
    if not failing:
        return f"{result.workload} on {result.platform}: {unrecorded[0]}"
    last = launches[-1]
    used = f"{len(launches)} launches of {last.num_steps} steps" if len(launches) > 1 else f"{last.num_steps} steps"
    lines = [f"{result.workload} on {result.platform}, {used}:"]
    lines += [f"  {line}" for line in (*failing, *unrecorded, *notes)]
    if any(METRICS[verdict.metric].kind is MetricKind.TIMING for verdict in failing):
        lines.append(f"  median step time by rank: {last.fastest_rank_p50_ms:g} to {last.slowest_rank_p50_ms:g} ms")
    if baseline is not None and not unrecorded:
        lines.append(f"  baseline: {baseline}")
    return "\n".join([*lines, *(f"  next: {step}" for step in _next_steps(failing, baseline))])


def _unrecorded_line(verdict: Verdict, test: str) -> str:
    where = f" in {verdict.reference.name}" if verdict.reference.revision is None else ""
    return f"{verdict.detail}{where}; {verdict.remedy} with: pytest {shlex.quote(test)} --update-baselines"


def _next_steps(failing: Sequence[Verdict], baseline: Path | None) -> list[str]:
    present = [verdict for verdict in failing if not verdict.is_lost]
    outcomes = {verdict.outcome for verdict in present}
    paired = baseline is None or any(verdict.is_by_ab for verdict in present)
    steps = []
    if baseline is not None and outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}:
        steps.append(
            "if the change is intended, run --update-baselines --aorta-record=replace and say why in the commit"
        )
    if Outcome.INCONCLUSIVE in outcomes:
        steps.append("allow more launches (--aorta-max-launches=12), measure more steps, or widen the tolerance")
    # An A/B in one session block adds nothing for metrics without noise, which have no delta.
    if not paired and any(verdict.delta is not None for verdict in present):
        steps.append("if in doubt, compare with another version side by side: --aorta-ab=main (any git ref)")
    return steps


def noisy_baseline_text(case: str, problems: Sequence[str]) -> str:
    """Return why launches were not recorded as a baseline."""
    lines = [
        f"{case}: not recorded, because the launches are too noisy for a baseline:",
        *(f"  {problem}" for problem in problems),
    ]
    return "\n".join([*lines, "  next: to record it nevertheless, give a reason: --aorta-record='noisy:the reason'"])


def finding_groups(record: TestRecord) -> list[list[Verdict]]:
    """Return the findings of a test in order; metrics of one comparison that lack a baseline form one group."""
    groups: dict[object, list[Verdict]] = {}
    for number, row in enumerate(record.verdicts):
        if row.is_finding:
            groups.setdefault((row.case, row.reason) if row.remedy else number, []).append(row)
    return list(groups.values())


def totals(records: Sequence[TestRecord]) -> str:
    """Return one line on a run: tests that launched, findings, matching metrics, and whatever was not compared.

    The line contains the number of launches unless it equals the number of tests, the matching metrics if any metric
    was compared, and every other count that is not 0. For a retried attempt, only the attempt and its launches count.
    """
    final = [record for record in records if not record.is_retried]
    rows = [row for record in final for row in record.verdicts]
    found = Counter(row.outcome for row in rows if row.is_finding)
    findings = [f"{found[outcome]} {outcome}" for outcome in FINDINGS if found[outcome]]
    head = [*_launched(final, records), *findings, *_matches(rows)]
    return "; ".join([", ".join(head), *_not_compared(rows), *_others(final, records)])


def _launched(final: Sequence[TestRecord], records: Sequence[TestRecord]) -> list[str]:
    tests = sum(record.num_launches > 0 for record in final)
    launches = sum(record.num_launches for record in records)
    if not launches:
        return ["no test launched"]
    return [counted(tests, "test")] + [counted(launches, "launch")] * (launches != tests)


def _matches(rows: Sequence[Verdict]) -> list[str]:
    if not rows:
        return []
    passed = [row for row in rows if row.outcome is Outcome.PASS]
    exact = sum(row.tolerance.is_exact for row in passed)
    kinds = {"exact": exact, "within tolerance": len(passed) - exact}
    text = "1 metric matches" if len(passed) == 1 else f"{len(passed)} metrics match"
    return [f"{text} ({', '.join(f'{count} {kind}' for kind, count in kinds.items() if count)})" if passed else text]


def _not_compared(rows: Sequence[Verdict]) -> list[str]:
    """Return the number of metrics that could not be compared, with each reason once."""
    reasons = Counter(str(row.not_applicable) for row in rows if row.outcome is Outcome.NOT_APPLICABLE)
    if len(reasons) < 2:
        return [f"{count} not applicable ({reason})" for reason, count in reasons.items()]
    counts = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    return [f"{reasons.total()} not applicable ({counts})"]


def _others(final: Sequence[TestRecord], records: Sequence[TestRecord]) -> list[str]:
    """Return the nonzero counts of expected regressions, new baselines and tests without a verdict."""
    counts = (
        (sum(row.is_expected for record in final for row in record.verdicts), "regression", "expected"),
        (sum(len(record.new_launches) for record in final), "baseline", "measured"),
        (sum(record.compared_nothing for record in final), "test", "without a comparison"),
        (sum(record.failed_without_verdict for record in final), "test", "failed without a verdict"),
        (sum(record.failed_before_launch for record in final), "test", "failed before a launch"),
        (sum(record.is_skipped for record in final), "test", "skipped for lack of devices"),
        (len(records) - len(final), "attempt", "retried"),
    )
    return [f"{counted(count, noun)} {rest}" for count, noun, rest in counts if count]


def change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Return the values of a written baseline before and after, metric by metric."""
    center = counted(len(new.center_launches), "launch")
    count = f"{center} in the center, {len(new.launches)} in total, revision {new.revision}"
    lines = [f"{'updated' if old else 'recorded'} {new.platform}: {new.case} ({count})"]
    for metric in METRICS.values():
        after, before = middle(metric, new.center_launches), middle(metric, old.center_launches) if old else None
        if after is None and before is None:
            continue
        shown = (
            format_value(value, metric.unit, exact=metric.direction is Direction.EXACT) for value in (before, after)
        )
        text = f"  {metric.name}: {' -> '.join(shown)}"
        if isinstance(before, float) and isinstance(after, float) and before:
            text += f" ({(after - before) / abs(before):+.1%})"
        lines.append(text)
    if reason := new.forced.get(str(new.revision)):
        lines.append(f"  recorded although it is noisy: {reason}")
    return lines
