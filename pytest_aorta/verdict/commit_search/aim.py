"""The aim of a search for a commit: the metric that differs between the ends, and how it is searched."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.verdict.kernel_gate import of_family
from pytest_aorta.verdict.metrics import METRICS, Metric, MetricKind, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

# A tolerance that a message proposes.
_EXAMPLE = 0.05


def is_exact(row: Verdict) -> bool:
    """Return whether a metric that differs between the ends is searched without noise."""
    return row.outcome is Outcome.MISSING or row.tolerance.is_exact or isinstance(row.value, str)


def varies(aim: Verdict) -> str:
    """Return why launches of one commit do not agree on a metric that is searched without noise."""
    metric = METRICS[aim.metric]
    if aim.missing is not None:
        return f"{metric.name} is missing in some launches of one commit, but not in all of them"
    if metric.kind in (MetricKind.TIMING, MetricKind.MEMORY):
        example = Tolerance(_EXAMPLE, metric.scale)
        return (
            f"{metric.name} varies between launches of one commit, but has to be equal bit for bit; give a tolerance, "
            f"such as --tolerance {metric.name}={example}"
        )
    return f"{metric.name} differs between launches of one commit; run the test in its deterministic mode"


def chosen(rows: Sequence[Verdict]) -> Verdict | None:
    """Return the metric to search: one without noise if there is one, else the metric with the clearest change."""
    if exact := [row for row in rows if is_exact(row)]:
        return exact[0]
    return max((row for row in rows if row.delta is not None), key=_clearness, default=None)


def _clearness(row: Verdict) -> float:
    if row.delta is None or row.low is None or row.high is None:
        return 0.0
    return abs(row.delta) / max(row.high - row.low, 1e-12)


def searched(aim: Verdict) -> Metric:
    """Return the metric to search: of kernel families, the time of the worst one, since their sum can be unchanged."""
    metric = METRICS[aim.metric]
    return of_family(metric, aim.part) if aim.part else metric


def part_notes(aim: Verdict) -> list[str]:
    """Return a note with the kernel family that was searched, if the metric consists of families."""
    return [f"{aim.metric}: the time of {aim.part} was searched"] if aim.part else []


def least_change(metric: Metric, aim: Verdict) -> float:
    """Return half of the tolerance, or of a smaller change of the ends: families may change by less than it."""
    least = metric.scale.difference(min(aim.tolerance.value or 0.0, abs(aim.delta or 0.0))) / 2
    return -least if aim.outcome is Outcome.IMPROVED else least
