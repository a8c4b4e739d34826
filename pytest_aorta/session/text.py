"""Text of failures, totals and changed baselines."""

from __future__ import annotations

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
    """What a workload's own checks found, the first places in full."""
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
) -> str:
    """The failing verdicts, what else the launches showed, which file they were compared with, and what to do."""
    last = launches[-1]
    used = f"{len(launches)} launches of {last.num_steps} steps" if len(launches) > 1 else f"{last.num_steps} steps"
    lines = [f"{result.workload} on {result.platform}, {used}:"]
    lines += [f"  {verdict}" for verdict in failing]
    lines += [f"  {note}" for note in notes]
    lines.append(f"  ranks' own median steps: {last.fastest_rank_p50_ms:g} to {last.slowest_rank_p50_ms:g} ms")
    if baseline is not None:
        lines.append(f"  baseline: {baseline}")
    return "\n".join([*lines, *(f"  next: {step}" for step in _next_steps(failing, baseline))])


def _next_steps(failing: Sequence[Verdict], baseline: Path | None) -> list[str]:
    present = [verdict for verdict in failing if not verdict.is_lost]
    outcomes = {verdict.outcome for verdict in present}
    paired = baseline is None or any(verdict.is_by_ab for verdict in present)
    steps = []
    if baseline is not None and outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}:
        steps.append(
            "if it is intended, record it with --update-baselines --aorta-reset-baselines and say why in the commit"
        )
    if Outcome.INCONCLUSIVE in outcomes:
        more = "pairs of launches (--aorta-max-launches=12)" if paired else "launches (--aorta-max-launches=9)"
        steps.append(f"allow more {more}, measure more steps, or widen the tolerance")
    # Between launches of one sitting, what does not vary needs no second opinion.
    if not paired and any(verdict.delta is not None for verdict in present):
        steps.append("if in doubt, compare with another version, launch by launch: --aorta-ab=main (any git ref)")
    return steps


def noisy_baseline_text(case: str, problems: Sequence[str]) -> str:
    """Why launches were not taken for a baseline."""
    lines = [f"{case}: not recorded, since it would make a bad baseline:", *(f"  {problem}" for problem in problems)]
    return "\n".join([*lines, "  to take it all the same: --aorta-force-baseline='the reason'"])


def totals(records: Sequence[TestRecord]) -> str:
    """Launches, verdicts by outcome, and tests that lacked devices."""
    outcomes = Counter(verdict.outcome.value for record in records for verdict in record.verdicts)
    lacking = sum(record.lacked_devices is not None for record in records)
    launches = sum(record.num_launches for record in records)
    parts = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
    verdicts = f"{sum(outcomes.values())} compared" + (f" ({', '.join(parts)})" if parts else "")
    return f"{launches} launched, {verdicts}, {lacking} skipped for lack of devices"


def change_lines(old: Baseline | None, new: Baseline) -> list[str]:
    """Before and after of one written baseline, metric by metric."""
    count = (
        f"{counted(len(new.center_launches), 'launch')} at its centre, {len(new.launches)} in all, epoch {new.revision}"
    )
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
        lines.append(f"  taken although it is noisy: {reason}")
    return lines
