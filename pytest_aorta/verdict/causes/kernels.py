"""Text on the kernels and collectives that cause a regression of time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median, mode

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.families import is_communication
from pytest_aorta.result.trace.profiled_steps import FamilyTime
from pytest_aorta.result.trace.transfers import CollectiveFacts

# The least change that is named, as a fraction of the step, of the largest change, and of the change of the step.
LEAST_OF_STEP = 0.001
_LEAST_OF_LARGEST = 0.1
_LEAST_OF_CHANGE = 0.05
_MOST_NAMED = 3
# The longest wait of a late rank itself, as a fraction of its peers' wait. Of two ranks, the one that is late in two
# thirds of the calls waits half as long as the other. A rank that waits longer is late in turns with its peers.
_MOST_OWN_WAIT = 0.5
_ABSENT = FamilyTime(0.0, 0.0)


def moved(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """Return text on the families and collectives whose times changed from ``others`` to ``launches``.

    The text names families that increased, are new or are gone, slower transfers of collectives, and ranks that arrive
    late, unless launches of one side differ as much. It is empty if one side has no profiled steps, or if nothing
    changed by a thousandth of the step and by a twentieth of the step's own change: smaller changes do not explain the
    regression.
    """
    now_ms, before_ms = (median(launch.step_time_ms["p50"] for launch in side) for side in (launches, others))
    least_ms = max(LEAST_OF_STEP * before_ms, _LEAST_OF_CHANGE * (now_ms - before_ms))
    parts = [_families(launches, others, least_ms), *_collectives(launches, others, least_ms)]
    return "; ".join(filter(None, parts))


def clearly_above(here: Sequence[float], there: Sequence[float]) -> bool:
    """Return True if nine tenths of the values ``here`` are above nine tenths of those ``there``."""
    return sorted(here)[len(here) // 10] > sorted(there)[-1 - len(there) // 10]


def median_times(launches: Sequence[LaunchFacts]) -> dict[str, FamilyTime]:
    """Return the median time and calls of each family that is not communication; a launch without a family counts 0."""
    return {family: _median_time(times) for family, times in _times(launches).items()}


def _times(launches: Sequence[LaunchFacts]) -> dict[str, list[FamilyTime]]:
    """Return the times of each family in each launch that has kernels."""
    known = [launch.kernels for launch in launches if launch.kernels]
    names = sorted({family for kernels in known for family in kernels if not is_communication(family)})
    return {family: [kernels.get(family, _ABSENT) for kernels in known] for family in names}


def _median_time(times: Sequence[FamilyTime]) -> FamilyTime:
    return FamilyTime(median(time.ms for time in times), median(time.calls for time in times))


def _families(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], least_ms: float) -> str:
    here, there = _times(launches), _times(others)
    if not here or not there:
        return ""
    pairs = {family: (here.get(family, [_ABSENT]), there.get(family, [_ABSENT])) for family in here | there}
    middles = {family: (_median_time(now), _median_time(before)) for family, (now, before) in pairs.items()}
    changes = {family: now.ms - before.ms for family, (now, before) in middles.items()}
    least_ms = max(least_ms, _LEAST_OF_LARGEST * max(map(abs, changes.values())))
    texts: list[str] = []
    named: Counter[str] = Counter()
    for family in sorted(pairs, key=lambda name: -abs(changes[name])):
        if abs(changes[family]) < least_ms or not _is_clear(*pairs[family]):
            continue
        kind, text = _change(family, *middles[family])
        named[kind] += 1
        if text and named[kind] <= _MOST_NAMED:
            texts.append(text)
    what = "operators" if launches[0].device == "cpu" else "kernels"
    return f"{what} per step: {', '.join(texts)}" if texts else ""


def _is_clear(now: Sequence[FamilyTime], before: Sequence[FamilyTime]) -> bool:
    now_ms, before_ms = ([one.ms for one in side] for side in (now, before))
    return clearly_above(now_ms, before_ms) or clearly_above(before_ms, now_ms)


def _change(family: str, now: FamilyTime, before: FamilyTime) -> tuple[str, str]:
    """Return the kind of a family's change and its text, which is empty for a family that got faster."""
    if not before.calls:
        return "new", f"new {family} {now.ms:.3g} ms ({_calls(now.calls)})"
    if not now.calls:
        return "gone", f"gone {family} {before.ms:.3g} ms ({_calls(before.calls)})"
    if now.ms < before.ms:
        return "faster", ""
    return "slower", f"{family} {now.ms - before.ms:+.3g} ms ({_calls(now.calls)}, was {before.calls:.4g})"


def _calls(number: float) -> str:
    return f"{number:.4g} call{'' if number == 1 else 's'}"


def _collectives(launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], least_ms: float) -> list[str]:
    """Return a text for each collective whose transfer got slower or whose ranks wait longer for late ranks."""
    found = []
    for kind in sorted({kind for launch in launches for kind in launch.collectives}):
        here, there = (
            [side.collectives[kind] for side in part if kind in side.collectives] for part in (launches, others)
        )
        if not there:
            continue
        texts = [_transfer(here, there, least_ms), _late_ranks(here, there, least_ms)]
        if any(texts):
            found.append(f"{kind}: {', '.join(filter(None, texts))}")
    return found


def _transfer(here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], least_ms: float) -> str:
    increase = _increase(here, there, lambda facts: facts.transfer_ms, least_ms)
    if increase is None:
        return ""
    now_ms, before_ms = increase
    text = f"transfer {now_ms:.3g} ms/step, was {before_ms:.3g}"
    now_calls, before_calls = (_median(side, lambda facts: facts.calls) for side in (here, there))
    text += f", {_calls(now_calls)}, was {before_calls:.4g}"
    speeds = [[facts.bus_gb_per_s for facts in side if facts.bus_gb_per_s] for side in (here, there)]
    if not all(speeds):
        return text
    now_mb, before_mb = (_median(side, lambda facts: facts.bus_bytes) / 1e6 for side in (here, there))
    now_speed, before_speed = map(median, speeds)
    return f"{text}, {now_mb:.4g} MB on the bus, was {before_mb:.4g}, at {now_speed:.3g} GB/s, was {before_speed:.3g}"


def _late_ranks(here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], least_ms: float) -> str:
    """Return text on the rank that arrives late, or on all ranks if they wait for each other in turns."""
    increase = _increase(here, there, lambda facts: facts.peers_wait_ms, least_ms)
    if increase is None:
        return ""
    now_ms, before_ms = increase
    own_now_ms, own_before_ms = (_median(side, lambda facts: facts.straggler_wait_ms) for side in (here, there))
    if own_now_ms - own_before_ms > _MOST_OWN_WAIT * (now_ms - before_ms):
        return f"ranks arrive late in turns, each waits {own_now_ms:.3g} ms/step or more, was {own_before_ms:.3g}"
    rank = mode(facts.straggler for facts in here)
    return f"rank {rank} arrives late, its peers wait {now_ms:.3g} ms/step, was {before_ms:.3g}"


def _increase(
    here: Sequence[CollectiveFacts],
    there: Sequence[CollectiveFacts],
    value: Callable[[CollectiveFacts], float],
    least_ms: float,
) -> tuple[float, float] | None:
    """Return the medians of a time after and before a clear increase by ``least_ms`` or more, or None."""
    now_ms, before_ms = _median(here, value), _median(there, value)
    is_clear = clearly_above([*map(value, here)], [*map(value, there)])
    return (now_ms, before_ms) if is_clear and now_ms - before_ms >= least_ms else None


def _median(side: Sequence[CollectiveFacts], value: Callable[[CollectiveFacts], float]) -> float:
    return median(map(value, side))
