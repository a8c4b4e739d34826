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
from pytest_aorta.verdict.metrics import METRICS, Direction, format_value, middle
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

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
            "if the change is intended, run --update-baselines --aorta-reset-baselines and say why in the commit"
        )
    if Outcome.INCONCLUSIVE in outcomes:
        steps.append("allow more launches (--aorta-max-launches=13), measure more steps, or widen the tolerance")
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
    return "\n".join([*lines, "  next: to record it nevertheless, give a reason: --aorta-force-baseline='the reason'"])


def totals(records: Sequence[TestRecord]) -> str:
    """Return the numbers of launches, of verdicts by outcome, and of tests without enough devices.

    Attempts that were retried, and tests that failed before a launch, are added where there are any. Of a retried
    attempt, only the launches are counted.
    """
    final = [record for record in records if not record.is_retried]
    outcomes = Counter(verdict.outcome.value for record in final for verdict in record.verdicts)
    early = sum(record.failed_before_launch for record in final)
    lacking = sum(record.lacked_devices is not None and not record.failed_before_launch for record in final)
    retried = len(records) - len(final)
    launches = sum(record.num_launches for record in records)
    parts = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
    verdicts = f"{sum(outcomes.values())} compared" + (f" ({', '.join(parts)})" if parts else "")
    more = [f"{early} failed before a launch"] * bool(early) + [f"{counted(retried, 'attempt')} retried"] * bool(
        retried
    )
    return ", ".join([f"{launches} launched, {verdicts}, {lacking} skipped for lack of devices", *more])


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
