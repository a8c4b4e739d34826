"""The lines that ``aorta run`` prints about a trial."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import WorkloadResult, over_ranks
from pytest_aorta.verdict.metrics import METRICS, Direction, format_value

# Smaller differences between the medians of ranks are noise.
_LEAST_SPAN = 0.01
_SHOWN = ("step_time_p50", "step_time_p99")


def summary_lines(result: WorkloadResult) -> list[str]:
    """Return lines about step times, ranks, metrics, weight hash and loss, as far as the result has them."""
    facts = launch_facts(result)
    lines = [_step_times(result, facts), *_ranks(result), *_metrics(result)]
    if facts.late_steps:
        lines.append(f"overlap: {facts.late_steps}")
    if result.weight_hashes:
        step = max(result.weight_hashes, key=int)
        lines.append(f"weight hash after step {step}: {result.weight_hashes[step]}")
    if result.loss:
        lines.append(f"loss: {result.loss[0]:.6g} in the first step, {result.loss[-1]:.6g} in the last")
    return lines


def _step_times(result: WorkloadResult, facts: LaunchFacts) -> str:
    # A percentile that needs more steps is not printed; the file has all step times.
    named = [METRICS[name] for name in _SHOWN if facts.num_steps >= METRICS[name].min_steps]
    shown = [
        f"{metric.name.removeprefix('step_time_')} {format_value(metric.measure(facts), 'ms')}" for metric in named
    ]
    if len(named) < len(_SHOWN):
        shown.append(f"slowest {format_value(facts.step_time_ms['max'], 'ms')}")
    return f"step time: {', '.join(shown)} ({facts.num_steps} steps on {result.platform})"


def _ranks(result: WorkloadResult) -> list[str]:
    own = [median(times) for times in result.rank_step_times_ms]
    if len(own) == 1:
        return [f"only rank 0 of {result.world_size} has step times"] if result.world_size > 1 else []
    slowest, fastest = max(own), min(own)
    if slowest <= fastest * (1 + _LEAST_SPAN):
        return [f"ranks: all within {_LEAST_SPAN:.0%} of each other by their own median step"]
    return [
        f"ranks: {own.index(slowest)} is the slowest by its own median step, {slowest:.4g} ms; "
        f"{own.index(fastest)} the fastest, {fastest:.4g} ms"
    ]


def _metrics(result: WorkloadResult) -> list[str]:
    shown = []
    for name in sorted(result.rank_metrics):
        metric, value = METRICS.get(name), over_ranks(name, result.rank_metrics[name])
        is_count = metric.direction is Direction.EXACT if metric else value.is_integer()
        shown.append(f"{name}: {format_value(value, metric.unit if metric else '', exact=is_count)}")
    return shown


def failure_lines(result: WorkloadResult, limit: int = 3) -> Sequence[str]:
    """Return the failures that the workload's own checks found."""
    if result.passed:
        return []
    found = [str(detail) for detail in result.failure_details[:limit]]
    return [f"FAILED: {result.failure_count} of its own checks", *(f"  {line}" for line in found)]
