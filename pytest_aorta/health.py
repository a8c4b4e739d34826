"""What a comparison's launches show besides its verdicts: a slow rank, growth within a launch, a sick machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_aorta.facts import LaunchFacts

# Of the median step, that a rank waits less than the others. On 4 H200s ranks of unchanged launches differ by up to
# 2%; on CPU ranks, that share cores, by tens of percent.
SLOW_RANK_SHARE = {"cuda": 0.03, "cpu": 0.3}
# Growth from a launch's first step to its last that is worth telling.
STEP_GROWTH = {"cuda": 0.03, "cpu": 0.5}
MEMORY_GROWTH = 0.03
# Of the canary, beyond the baseline's.
CANARY_CHANGE = {"cuda": 0.05, "cpu": 1.0}
_CANARY_PARTS = {"gemm_ms": "GEMM", "all_reduce_ms": "all-reduce"}


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for, and by how much a step."""

    rank: int
    lag_ms: float


def slow_rank(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts] = ()) -> SlowRank | None:
    """The one rank that waits clearly less in collectives than the others, beyond what it did in ``reference``."""
    lags = _median_lags(launches)
    if not lags:
        return None
    usual = _median_lags(reference)
    if len(usual) == len(lags):
        lags = [lag - before for lag, before in zip(lags, usual, strict=True)]
    last = max(range(len(lags)), key=lambda rank: lags[rank])
    p50_ms = median(launch.step_time_ms["p50"] for launch in launches)
    if lags[last] <= SLOW_RANK_SHARE[_device(launches)] * p50_ms:
        return None
    return SlowRank(last, lags[last])


def notes(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts]) -> list[str]:
    """One line for each thing that somebody who reads a verdict should know."""
    found = []
    if slow := slow_rank(launches, reference):
        found.append(f"rank {slow.rank} is the slow one: it waits {slow.lag_ms:.3g} ms a step less than the others")
    device = _device(launches)
    steps = median(launch.step_time_growth for launch in launches)
    if abs(steps) > STEP_GROWTH[device]:
        found.append(f"steps get {'slower' if steps > 0 else 'faster'} within a launch, by {abs(steps):.1%} or more")
    memory = median(launch.memory_growth for launch in launches)
    if memory > MEMORY_GROWTH:
        found.append(f"memory grows within a launch, by {memory:.1%} or more: a leak?")
    return found + canary_notes(launches, reference)


def canary_notes(launches: Sequence[LaunchFacts], reference: Sequence[LaunchFacts]) -> list[str]:
    """Where the fixed program was slower than beside the reference's launches too: it is the machine then."""
    found = []
    for name, part in _CANARY_PARTS.items():
        here = [launch.canary_ms[name] for launch in launches if name in launch.canary_ms]
        there = [launch.canary_ms[name] for launch in reference if name in launch.canary_ms]
        if not here or not there or not median(there):
            continue
        change = median(here) / median(there) - 1
        if change > CANARY_CHANGE[_device(launches)]:
            found.append(f"the canary's {part} was {change:.0%} slower than at the baseline: suspect the machine")
    return found


def _median_lags(launches: Sequence[LaunchFacts]) -> list[float]:
    known = [launch.rank_lag_ms for launch in launches if launch.rank_lag_ms]
    sizes = {len(lags) for lags in known}
    return [median(lags) for lags in zip(*known, strict=True)] if len(sizes) == 1 else []


def _device(launches: Sequence[LaunchFacts]) -> str:
    return str(launches[0].environment.get("device", "cuda"))
