"""Text of failures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import Comparison, Side
from pytest_aorta.verdict.metrics import METRICS, MetricKind
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
    last = launches[-1]
    used = f"{len(launches)} launches of {last.num_steps} steps" if len(launches) > 1 else f"{last.num_steps} steps"
    lines = [f"{where}, {used}:"]
    lines += [f"  {line}" for line in (*failing, *unrecorded, *comparison.notes)]
    if any(METRICS[verdict.metric].kind is MetricKind.TIMING for verdict in failing):
        lines.append(f"  median step time by rank: {last.fastest_rank_p50_ms:g} to {last.slowest_rank_p50_ms:g} ms")
    if comparison.baseline and not unrecorded:
        lines.append(f"  baseline: {comparison.baseline}")
    return "\n".join([*lines, *(f"  next: {step}" for step in _next_steps(failing, comparison.baseline))])


def _unrecorded_line(verdict: Verdict, test: str) -> str:
    where = f" in {verdict.reference.name}" if verdict.reference.revision is None else ""
    return f"{verdict.detail}{where}; {verdict.remedy} with: pytest {shlex.quote(test)} --update-baselines"


def _next_steps(failing: Sequence[Verdict], baseline: str) -> list[str]:
    present = [verdict for verdict in failing if not verdict.is_lost]
    outcomes = {verdict.outcome for verdict in present}
    paired = not baseline or any(verdict.is_by_ab for verdict in present)
    steps = []
    if baseline and outcomes & {Outcome.REGRESSION, Outcome.IMPROVED}:
        steps.append(
            "if the change is intended, run --update-baselines --aorta-record=replace and say why in the commit"
        )
    if Outcome.INCONCLUSIVE in outcomes:
        steps.append("allow more launches (--aorta-max-launches=12), measure more steps, or widen the tolerance")
    # An A/B in one session block adds nothing for metrics without noise, which have no delta.
    if not paired and any(verdict.delta is not None for verdict in present):
        steps.append("if in doubt, compare with another version side by side: --aorta-ab=main (any git ref)")
    return steps
