"""Notes that explain a verdict: ranks, growth, the machine, exposed collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.statistics.variance import median_variance

# Of the median step, that a rank waits less than the others. On 4 H200s ranks of unchanged launches differ by up to
# 2%; on CPU ranks, that share cores, by tens of percent.
STRAGGLER_FRACTION = {"cuda": 0.03, "cpu": 0.3}
# The least that counts where reference launches show what is usual.
_SHIFT_FRACTION = {"cuda": 0.01, "cpu": 0.1}
_MIN_REFERENCE = 3
_NOISES = 3.0
# Growth from a launch's first step to its last that is worth telling.
STEP_GROWTH = {"cuda": 0.03, "cpu": 0.5}
MEMORY_GROWTH = 0.03
# Of the canary, beyond the baseline's.
CANARY_CHANGE = {"cuda": 0.05, "cpu": 1.0}
# Of the SM clock, below the baseline's; between launches of unchanged code it differs by less.
CLOCK_CHANGE = 0.05
_CANARY_PARTS = {"gemm_ms": "GEMM", "all_reduce_ms": "all-reduce"}


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, and by how much a step."""

    rank: int
    lag_ms: float


def straggler(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts] = ()) -> Straggler | None:
    """The one rank that waits clearly less in collectives than the others.

    Ranks of unchanged launches differ too, by their place in the machine: against ``reference``, what counts is how
    much more a rank lags than it did there. That has to be half of what the steps got longer, or more, and beyond
    three times the scatter of the reference's launches.
    """
    lags, usual = _lags(launches), _lags(reference)
    if not lags:
        return None
    known = bool(usual) and len(usual[0]) == len(lags[0])
    shifts = _medians(lags)
    if known:
        shifts = [lag - before for lag, before in zip(shifts, _medians(usual), strict=True)]
    last = max(range(len(shifts)), key=lambda rank: shifts[rank])
    p50_ms, device = _p50_ms(launches), launches[0].device
    needed = STRAGGLER_FRACTION[device] * p50_ms
    if known and len(usual) >= _MIN_REFERENCE:
        noise = _NOISES * _lag_deviation(usual) * math.sqrt(median_variance(len(lags)) + median_variance(len(usual)))
        needed = max(_SHIFT_FRACTION[device] * p50_ms, noise, (p50_ms - _p50_ms(reference)) / 2)
    return Straggler(last, shifts[last]) if shifts[last] > needed else None


def notes(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts]) -> list[str]:
    """One line for each thing that somebody who reads a verdict should know."""
    found = []
    if slow := straggler(launches, reference):
        found.append(f"rank {slow.rank} is the slow one: it waits {slow.lag_ms:.3g} ms a step less than the others")
    device = launches[0].device
    steps = median(launch.step_time_growth for launch in launches)
    if abs(steps) > STEP_GROWTH[device]:
        found.append(f"steps get {'slower' if steps > 0 else 'faster'} within a launch, by {abs(steps):.1%} or more")
    memory = median(launch.memory_growth for launch in launches)
    if memory > MEMORY_GROWTH:
        found.append(f"memory grows within a launch, by {memory:.1%} or more: a leak?")
    return found + throttle_notes(launches, reference) + canary_notes(launches, reference)


def throttle_notes(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts]) -> list[str]:
    """Which launches' devices were throttled, and clocks that were lower than beside the reference's launches."""
    found = [f"launch {number}: {launch.throttled}" for number, launch in enumerate(launches, 1) if launch.throttled]
    hot = [launch.throttled for launch in reference if launch.throttled]
    if hot:
        found.append(f"{len(hot)} of the {len(reference)} launches compared with: {hot[-1]}")
    here, there = _clocks_mhz(launches), _clocks_mhz(reference)
    if here and there and median(here) < (1 - CLOCK_CHANGE) * median(there):
        found.append(
            f"the SM clock was {1 - median(here) / median(there):.0%} lower than at the baseline: "
            f"{median(here):,.0f} against {median(there):,.0f} MHz"
        )
    return found


def _clocks_mhz(launches: Sequence[LaunchFacts]) -> list[float]:
    return [launch.sm_clock_mhz for launch in launches if launch.sm_clock_mhz is not None]


def canary_notes(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts]) -> list[str]:
    """Where the fixed program was slower than beside the reference's launches too: it is the machine then."""
    found = []
    for name, part in _CANARY_PARTS.items():
        here = [launch.canary_ms[name] for launch in launches if name in launch.canary_ms]
        there = [launch.canary_ms[name] for launch in reference if name in launch.canary_ms]
        if not here or not there or not median(there):
            continue
        change = median(here) / median(there) - 1
        if change > CANARY_CHANGE[launches[0].device]:
            found.append(f"the canary's {part} was {change:.0%} slower than at the baseline: suspect the machine")
    return found


def _lags(launches: Sequence[LaunchFacts]) -> list[list[float]]:
    known = [launch.rank_lag_ms for launch in launches if launch.rank_lag_ms]
    return known if len({len(lags) for lags in known}) == 1 else []


def _medians(lags: Sequence[Sequence[float]]) -> list[float]:
    return [median(values) for values in zip(*lags, strict=True)]


def _lag_deviation(lags: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a rank's lag between launches, over all ranks."""
    off = [value - middle for values in lags for value, middle in zip(values, _medians(lags), strict=True)]
    return math.sqrt(sum(value**2 for value in off) / (len(off) - len(lags[0])))


def _p50_ms(launches: Sequence[LaunchFacts]) -> float:
    return median(launch.step_time_ms["p50"] for launch in launches)


# Metrics that it explains.
EXPLAINED = ("overlap_ratio", "exposed_comm_ms")


def exposure(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """The collective whose exposed time grew most from ``others`` to ``launches``, and the worst rank.

    Of each collective the median over launches counts, and of ranks the one that is worst most often. Empty where no
    launch knows.
    """
    now, before = _median_exposed_ms(launches), _median_exposed_ms(others)
    if not now:
        return ""
    kind = max(now, key=lambda name: now[name] - before.get(name, 0.0))
    was = f", was {before.get(kind, 0.0):.3g}" if before else ""
    ranks = [launch.most_exposed_rank for launch in launches if launch.most_exposed_rank is not None]
    worst = f"; rank {max(ranks, key=ranks.count)} worst" if ranks else ""
    return f"{kind} exposed {now[kind]:.3g} ms a step{was}{worst}"


def _median_exposed_ms(launches: Sequence[LaunchFacts]) -> dict[str, float]:
    known = [launch.exposed_ms for launch in launches if launch.exposed_ms]
    kinds = {kind for exposed in known for kind in exposed}
    return {kind: median(exposed.get(kind, 0.0) for exposed in known) for kind in sorted(kinds)}
