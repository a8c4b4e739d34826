"""Rules that decide whether a metric can be compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.metrics import Metric, Tolerance
from pytest_aorta.verdict.priors import BLOCK_GAP_S
from pytest_aorta.verdict.statistics.scale import Scale

# Between launches on shared CPUs step times vary by tens of percent, so that less than a doubling is noise; what is
# hidden varies by tens of points.
CPU_TIMING_TOLERANCE = {Scale.RELATIVE: 1.0, Scale.POINTS: 0.25, Scale.OF_STEP: 0.5}
# The config key of test-only hooks: what is planted there has to show against the undisturbed baseline.
TEST_HOOK_KEY = "fault"


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that a baseline belongs to: all but the test-only hook."""
    return {key: value for key, value in config.items() if key != TEST_HOOK_KEY}


def widened(metric: Metric, facts: LaunchFacts, tolerance: Tolerance) -> Tolerance:
    """The tolerance that a stored baseline can hold: CPU ranks' timing takes no finer one than its noise."""
    if metric.kind != "timing" or facts.device != "cpu" or tolerance is metric.default:
        return tolerance
    return Tolerance(max(tolerance.relative or 0.0, CPU_TIMING_TOLERANCE[metric.scale]), metric.scale)


def under_profiler(metric: Metric, launches: Sequence[LaunchFacts]) -> str | None:
    """Why times can't be compared at all: a profiler around the ranks took its part of them."""
    found = next((launch.profiler for launch in launches if launch.profiler), None)
    return f"ranks ran under {found}, which takes time of its own" if found and metric.kind == "timing" else None


def not_applicable(metric: Metric, tolerance: Tolerance, facts: LaunchFacts, recorded: LaunchFacts) -> str | None:
    """Why a metric can't be compared between two launches, or None where it can."""
    if metric.kind == "timing" and recorded.launcher != facts.launcher:
        return f"ranks were started by {facts.launcher}, the baseline's by {recorded.launcher}"
    if metric.kind == "timing" and facts.device == "cpu":
        # The table's own tolerance, not one of a marker: such a test does not have the host alone.
        if tolerance is metric.default:
            return "timing of CPU ranks is compared only where a tolerance marker names it"
        if recorded.block != facts.block or time.time() - recorded.moment_s > BLOCK_GAP_S["cpu"]:
            return "timing of CPU ranks is compared only within an hour on one machine"
    if metric.kind != "numeric" or tolerance.relative is not None:
        return None
    if not (_reproducible(facts) and _reproducible(recorded)):
        return "this workload is not bitwise reproducible here; run it in its deterministic mode"
    return other_environment(facts, recorded)


def other_environment(facts: LaunchFacts, recorded: LaunchFacts) -> str | None:
    """The first of what numbers depend on that differs, None where nothing does."""
    for key in sorted(recorded.environment.keys() | facts.environment.keys()):
        here, there = facts.environment.get(key), recorded.environment.get(key)
        if here != there:
            return f"{key} is {here!r}, the baseline's {there!r}"
    return None


def _reproducible(facts: LaunchFacts) -> bool:
    return bool(facts.environment.get("bitwise_reproducible", True))


def other_config(recorded: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return why a baseline belongs to another config, or None where the configs are equal."""
    nothing = "no such key"
    for key in sorted(recorded.keys() | config.keys()):
        there, here = recorded.get(key, nothing), config.get(key, nothing)
        if here != there:
            remedy = "record it again with --update-baselines"
            return f"the baseline was recorded with {key}={there!r}, the test has {here!r}; {remedy}"
    return None
