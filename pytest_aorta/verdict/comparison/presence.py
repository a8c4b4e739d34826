"""Verdicts on metrics that one side of a comparison lacks, or that do not apply to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import (
    is_not_profiled_again,
    lost_reproducibility,
    not_applicable,
    not_profiled,
)
from pytest_aorta.verdict.comparison.rows import are_variants, missing_row
from pytest_aorta.verdict.metrics import Direction, Metric, MetricKind, middle
from pytest_aorta.verdict.noise.resolution import RESET
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict


def unprofiled_row(
    blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict | None:
    """Return the verdict for a metric that profiled steps of launches did not give, or None.

    The metric does not apply if no launch of the other side has it. If the other side has it, a new wait for the device
    and a trace that has become too large fail the test. Otherwise a change could avoid the comparison by either. After
    a late host, the next launch can have the metric.
    """
    found = [(launch, detail) for launch in launches if (detail := not_profiled(metric, launch))]
    if not found:
        return None
    known = profiled(metric, [other for other in others if metric.measure(other) is not None])
    if not known:
        launch, detail = found[0]
        reason = NotApplicable.TRACE if launch.overlap_problem else NotApplicable.HEAD_START
        return replace(blank, value=None).without_comparison(reason, detail)
    lasting = [detail for launch, detail in found if is_not_profiled_again(launch)]
    if not lasting:
        return None
    return missing_row(replace(blank, value=None, baseline=middle(metric, known)), Missing.CANDIDATE_VALUE, lasting[0])


def profiled(metric: Metric, launches: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    """Return the launches without those whose profiled steps gave no value of the metric."""
    return [launch for launch in launches if not_profiled(metric, launch) is None]


def after_late_hosts(row: Verdict, metric: Metric, launches: Sequence[LaunchFacts], most: int) -> Verdict:
    """Return ``row``. If hosts were late and no further launch is allowed, an open verdict becomes final."""
    late = [detail for launch in launches if (detail := not_profiled(metric, launch))]
    if not late or not row.is_open or len(launches) < most:
        return row
    number = f"{len(late)} of {counted(len(launches), 'launch')}" if len(launches) > 1 else "the launch"
    return replace(row, is_open=False, detail=f"no value of {number}: {late[-1]}")


def incomparable_row(
    blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict | None:
    """Return the verdict for a metric that one side lacks or that does not apply, or None if it can be compared."""
    known = [metric.measure(other) for other in others]
    if any(metric.measure(launch) is None for launch in launches):
        lost = replace(blank, value=None, baseline=known[-1])
        return missing_row(lost, Missing.CANDIDATE_VALUE, f"the launch has no {metric.name}")
    remedy = "" if blank.is_by_ab else "; if this is intended, record the baseline again with " + RESET
    if detail := _other_device(blank, launches, others[-1]):
        return missing_row(replace(blank, baseline=known[-1]), Missing.CANDIDATE_VALUE, detail + remedy)
    # A test may compare a reproducible variant with a variant that is not.
    is_bitwise = metric.kind is MetricKind.NUMERIC and blank.tolerance.value is None and not are_variants(blank)
    if is_bitwise and (detail := lost_reproducibility(launches, others[-1], str(blank.reference))):
        return missing_row(replace(blank, baseline=known[-1]), Missing.CANDIDATE_VALUE, detail + remedy)
    if found := not_applicable(metric, blank.tolerance, launches[0], others[-1], str(blank.reference)):
        shown = blank.baseline if metric.direction is Direction.EXACT else middle(metric, others)
        return replace(blank, baseline=shown).without_comparison(*found)
    if any(value is None for value in known):
        absent = f"the {blank.reference} has no {metric.name}"
        if reason := not_profiled(metric, others[-1]):
            absent = f"{absent}: {reason}"
        detail = absent if blank.is_by_ab else f"{absent}; record it again with {RESET}"
        return missing_row(blank, Missing.BASELINE_VALUE, detail)
    if metric.by_step is not None:
        here, there = max(metric.by_step(launches[-1])), max(metric.by_step(others[-1]))
        if here != there:
            detail = f"the last hash is that of step {here}, the {blank.reference}'s that of step {there}"
            return missing_row(replace(blank, baseline=known[-1]), Missing.CANDIDATE_VALUE, detail)
    return None


def _other_device(blank: Verdict, launches: Sequence[LaunchFacts], other: LaunchFacts) -> str | None:
    """Return text if a launch computed on another kind of device than the other side on the same platform, or None.

    The code has left the devices of its world, e.g. because torch finds no GPU and a script then takes the CPU.
    """
    if are_variants(blank) or blank.reference.kind is ReferenceKind.RESULTS:
        return None
    there = other.environment.get("device")
    for launch in launches:
        here = launch.environment.get("device")
        if None not in (here, there) and here != there:
            return f"the ranks computed on {here}, those of the {blank.reference} on {there}"
    return None
