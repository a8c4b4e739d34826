"""Text on the kernels and collectives that cause a regression of time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, mode

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import FamilyTime
from pytest_aorta.result.trace.families import is_communication
from pytest_aorta.result.trace.transfers import CollectiveFacts

# The least change that is named, as a fraction of the step, of the largest change, and of the change of the step.
LEAST_OF_STEP = 0.001
_LEAST_OF_LARGEST = 0.1
_LEAST_OF_CHANGE = 0.05
_MOST_NAMED = 3


def moved(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """Return text on the families and collectives whose times changed from ``others`` to ``launches``.

    The text names families that increased, are new or are gone, slower transfers of collectives, and ranks that arrive
    late. It is empty if one side has no profiled steps, or if nothing changed by a thousandth of the step and by a
    twentieth of the step's own change: smaller changes do not explain the regression.
    """
    now_ms, before_ms = (median(launch.step_time_ms["p50"] for launch in side) for side in (launches, others))
    least_ms = max(LEAST_OF_STEP * before_ms, _LEAST_OF_CHANGE * (now_ms - before_ms))
    parts = [_families(launches, others, least_ms), *_collectives(launches, others, least_ms)]
    return "; ".join(filter(None, parts))


def median_times(launches: Sequence[LaunchFacts]) -> dict[str, FamilyTime]:
    """Return the median time and calls of each family that is not communication; a launch without a family counts 0."""
    known = [launch.kernels for launch in launches if launch.kernels]
    absent = FamilyTime(0.0, 0.0)
    names = sorted({family for kernels in known for family in kernels if not is_communication(family)})
    each = {family: [kernels.get(family, absent) for kernels in known] for family in names}
    return {
        family: FamilyTime(median(time.ms for time in times), median(time.calls for time in times))
        for family, times in each.items()
    }


def _families(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], least_ms: float) -> str:
    here, there = median_times(launches), median_times(others)
    if not here or not there:
        return ""
    absent = FamilyTime(0.0, 0.0)
    pairs = {family: (here.get(family, absent), there.get(family, absent)) for family in here | there}
    changes = {family: now.ms - before.ms for family, (now, before) in pairs.items()}
    least_ms = max(least_ms, _LEAST_OF_LARGEST * max(map(abs, changes.values())))
    increased, new, gone = [], [], []
    for family in sorted(pairs, key=lambda name: -abs(changes[name])):
        now, before = pairs[family]
        if abs(changes[family]) < least_ms:
            continue
        if not before.calls:
            new.append(f"new {family} {now.ms:.3g} ms ({now.calls:.4g} calls)")
        elif not now.calls:
            gone.append(f"gone {family} {before.ms:.3g} ms ({before.calls:.4g} calls)")
        elif changes[family] > 0:
            increased.append(f"{family} {changes[family]:+.3g} ms ({now.calls:.4g} calls, was {before.calls:.4g})")
    named = [text for group in (increased, new, gone) for text in group[:_MOST_NAMED]]
    what = "operators" if launches[0].device == "cpu" else "kernels"
    return f"{what} per step: {', '.join(named)}" if named else ""


def _collectives(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], least_ms: float) -> list[str]:
    """Return a text for each collective whose transfer got slower or whose ranks wait longer for a late rank."""
    found = []
    for kind in sorted({kind for launch in launches for kind in launch.collectives}):
        here, there = (
            [side.collectives[kind] for side in part if kind in side.collectives] for part in (launches, others)
        )
        if not there:
            continue
        texts = [_transfer(here, there, least_ms), _late_rank(here, there, least_ms)]
        if any(texts):
            found.append(f"{kind}: {', '.join(filter(None, texts))}")
    return found


def _transfer(here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], least_ms: float) -> str:
    now_ms, before_ms = _median(here, lambda facts: facts.transfer_ms), _median(there, lambda facts: facts.transfer_ms)
    if now_ms - before_ms < least_ms:
        return ""
    text = f"transfer {now_ms:.3g} ms/step, was {before_ms:.3g}"
    now_calls, before_calls = (_median(side, lambda facts: facts.calls) for side in (here, there))
    text += f", {now_calls:.4g} calls, was {before_calls:.4g}"
    speeds = [[facts.bus_gb_per_s for facts in side if facts.bus_gb_per_s] for side in (here, there)]
    if not all(speeds):
        return text
    now_mb, before_mb = (_median(side, lambda facts: facts.bus_bytes) / 1e6 for side in (here, there))
    now_speed, before_speed = map(median, speeds)
    return f"{text}, {now_mb:.4g} MB on the bus, was {before_mb:.4g}, at {now_speed:.3g} GB/s, was {before_speed:.3g}"


def _late_rank(here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], least_ms: float) -> str:
    now_ms, before_ms = (_median(side, lambda facts: facts.peers_wait_ms) for side in (here, there))
    if now_ms - before_ms < least_ms:
        return ""
    rank = mode(facts.straggler for facts in here)
    return f"rank {rank} arrives late, its peers wait {now_ms:.3g} ms/step, was {before_ms:.3g}"


def _median(side: Sequence[CollectiveFacts], value: Callable[[CollectiveFacts], float]) -> float:
    return median(map(value, side))
