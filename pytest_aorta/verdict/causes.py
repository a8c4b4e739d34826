"""Text on the causes of a verdict: stragglers, kernels and collectives, the split of a step, the machine. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from statistics import median, mode

from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import ByDevice
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.trace.families import is_communication
from pytest_aorta.result.trace.overlap import Part
from pytest_aorta.result.trace.profiled_steps import CollectiveFacts, FamilyTime
from pytest_aorta.verdict.applicability import has_costs
from pytest_aorta.verdict.environment import changed_choice
from pytest_aorta.verdict.metrics import LATE_RANK, METRICS, MetricKind
from pytest_aorta.verdict.noise import RESET, median_step_ms
from pytest_aorta.verdict.schedules import cause_of_schedule, is_unchanged
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.variance import median_variance
from pytest_aorta.verdict.verdicts import Note, NoteKind, ReferenceKind, Verdict

# The least difference in waiting time, as a fraction of the median step, that makes a rank the straggler. Ranks of
# unchanged launches differ by up to 2% on 4 H200s, and by tens of percent on CPU ranks that share cores.
STRAGGLER_FRACTION = ByDevice(0.03, cpu=0.3)
# The same fraction if reference launches show the usual differences between ranks.
_SHIFT_FRACTION = ByDevice(0.01, cpu=0.1)
_MIN_REFERENCE = 3
_NOISES = 3.0
# One launch of this many may show a lag of the other sign.
_LAUNCHES_PER_OUTLIER = 10
# The least increase of the devices' mean idle time, as a fraction of a rank's lag, that explains the lag by late hosts
# of all ranks. While one host of two is late, the other rank's device is in a collective: half of the lag is idle time.
_IDLE_OF_LAG = 0.75
# The largest increase of the straggler's own compute, as a fraction of its lag, beside such an explanation.
_COMPUTE_OF_LAG = 0.5
# The least part of the straggler's lag that is named as garbage collection.
_GC_OF_LAG = 0.1
# The least growth from a launch's first step to its last that is reported.
_STEP_GROWTH = ByDevice(0.03, cpu=0.5)
# Growth of memory within a launch, as a fraction, after which its peak depends on the number of steps.
MEMORY_GROWTH = 0.03
# The least drop of the SM clock against the baseline that is reported; unchanged launches differ by less.
CLOCK_CHANGE = 0.05


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for.

    Attributes:
        rank: Its number.
        lag_ms: The difference between its peers' wait and its own wait, in ms per step.
        increase_ms: The increase of this difference over the reference; None if the reference has no known waits.
        idle_ms: The increase of the time per step in which no stream of a device is busy, a mean over ranks, if late
            hosts of all ranks explain the lag; None if they do not.
        gc_ms: The increase of the time per step in which it collects garbage.
    """

    rank: int
    lag_ms: float
    increase_ms: float | None = None
    idle_ms: float | None = None
    gc_ms: float = 0.0

    def note(self, side: str) -> str:
        """Return the line for a failure; ``side`` is the word for the reference."""
        if self.idle_ms is not None and self.increase_ms is not None:
            late = (
                f"the hosts are late, since no stream is busy for {self.idle_ms:.3g} ms/step longer than in the {side}"
            )
            last = f"rank {self.rank} arrives last, its peers wait {self.increase_ms:.3g} ms/step longer"
            return f"no straggler: {late}; {last}"
        lag_ms = self.lag_ms if self.increase_ms is None else self.increase_ms
        gc_ms = min(self.gc_ms, lag_ms)
        garbage = f"; garbage collection takes {gc_ms:.3g} ms of it" if gc_ms >= _GC_OF_LAG * lag_ms else ""
        if self.increase_ms is None:
            return f"rank {self.rank} is late: others wait {lag_ms:.3g} ms/step for it{garbage}"
        return f"rank {self.rank} is late: others wait {lag_ms:.3g} ms/step longer for it than in the {side}{garbage}"


def straggler(launches: Launches, reference: Launches = ()) -> Straggler | None:
    """Return the rank that waits clearly less in collectives than its peers, or None.

    Ranks of unchanged launches differ too, depending on their position in the machine. So with ``reference`` launches,
    the increase of a rank's lag over its lag in the reference counts. With three or more of them, it has to be at least
    half of the increase of the step time, and more than three standard deviations of the reference's lags. The lag
    itself has to exceed the same threshold, because a rank whose peers became as slow is not waited for. A rank that
    was as far ahead of its peers in another launch is not the straggler either: ranks are late in turns.
    """
    import numpy as np  # imported here, since importing numpy would add 0.1 s to every collection

    lags, usual = (np.array(_lags(side)) for side in (launches, reference))
    if not lags.size:
        return None
    known = usual.size > 0 and usual.shape[1] == lags.shape[1]
    now = np.median(lags, axis=0)
    before = np.median(usual, axis=0) if known else np.zeros_like(now)
    shifts = now - before
    p50_ms, device = median_step_ms(launches), launches[0].device
    needed = STRAGGLER_FRACTION[device] * p50_ms
    if known and len(usual) >= _MIN_REFERENCE:
        # The standard deviation of a rank's lag between launches, over all ranks, in ms.
        deviation = math.sqrt(((usual - before) ** 2).sum() / (usual.size - len(now)))
        noise = _NOISES * deviation * math.sqrt(median_variance(len(lags)) + median_variance(len(usual)))
        needed = max(_SHIFT_FRACTION[device] * p50_ms, noise, (p50_ms - median_step_ms(reference)) / 2)
    # The least lag of each rank in any launch, without the outliers that are allowed.
    least = np.sort(lags, axis=0)[len(lags) // _LAUNCHES_PER_OUTLIER]
    late = np.flatnonzero((now > needed) & (least > -needed))
    last = int(max(late, key=lambda rank: shifts[rank], default=-1))
    if last < 0 or shifts[last] <= needed:
        return None
    lag_ms, increase_ms = float(now[last]), float(shifts[last])
    gc_ms = [
        median([one.gc_ms[last] for one in side if last < len(one.gc_ms)] or [0.0]) for side in (launches, reference)
    ]
    found = Straggler(last, lag_ms, gc_ms=gc_ms[0] - gc_ms[1])
    if not known:
        return found
    return replace(found, increase_ms=increase_ms, idle_ms=_late_hosts_ms(launches, reference, increase_ms))


def _late_hosts_ms(launches: Launches, reference: Launches, lag_ms: float) -> float | None:
    """Return the increase of the devices' idle time if it explains that a rank lags by ``lag_ms`` more, else None.

    Hosts that are late by themselves drift apart, and one of them is the last. The devices of all ranks are then idle
    in the profiled steps, which all hosts begin together.
    """
    now, before = (_known(launch.metrics.get("device_idle_ms") for launch in side) for side in (launches, reference))
    if not now or not before or not _clearly_above(now, before):
        return None
    increase_ms = median(now) - median(before)
    here, there = (_medians(side, lambda launch: launch.breakdown_ms) for side in (launches, reference))
    compute_ms = here.get(Part.STRAGGLER, 0.0) - there.get(Part.STRAGGLER, 0.0)
    is_explained = increase_ms >= _IDLE_OF_LAG * lag_ms and compute_ms < _COMPUTE_OF_LAG * lag_ms
    return increase_ms if is_explained else None


def notes_on(
    rows: Sequence[Verdict], launches: Launches, others: Launches, side: str
) -> tuple[tuple[Note, ...], int | None]:
    """Return the notes on a comparison, and the suspect rank.

    A straggler explains slower steps.
    """
    failed = {row.definition.kind for row in rows if row.outcome is Outcome.REGRESSION}
    # In every launch on a busy machine, one rank waits for another.
    slow = straggler(launches, others) if MetricKind.TIMING in failed else None
    suspect = slow.rank if slow and slow.idle_ms is None else None
    found = [Note(slow.note(side), NoteKind.CAUSE if suspect is None else NoteKind.EDIT)] if slow else []
    found += map(Note, (*_split_note(rows, launches, others), *notes(launches, others, side)))
    found += [Note(text, NoteKind.NOTE) for text in _uncompared(launches, others, side)]
    described = dict.fromkeys((launch.description.optimizers, launch.description.apart) for launch in launches)
    found += [Note(text, NoteKind.WARNING if apart else NoteKind.NOTE) for text, apart in described if text]
    return tuple(found), suspect


def _uncompared(launches: Launches, others: Launches, side: str) -> Iterator[str]:
    """Yield lines on what is not compared, since one side lacks it."""
    here, graph = launches[0].costs, launches[0].description.graph_problem
    again = f"; record it again with {RESET}" if side == str(ReferenceKind.BASELINE) else ""
    if problem := next((group.costs.problem for group in here if group.costs.problem), ""):
        yield f"costs of a step are not compared: {problem}"
    elif here and others and not has_costs(others[-1]):
        yield f"costs of a step are not in the {side}{again}"
    if graph:
        yield f"the step's graph of streams is not compared: {graph}"
    elif launches[0].schedules and others and not others[-1].schedules:
        yield f"the step's graph of streams is not in the {side}{again}"
    if unseen := dict.fromkeys(one for group in launches[0].schedules for one in group.schedule.unseen):
        yield f"the step's graph of streams does not show {', '.join(unseen)}"
    if launches[0].buffer_hashes and others and not others[-1].buffer_hashes:
        yield f"buffers are not compared: the {side} has no hashes of them{again}"


def notes(launches: Launches, reference: Launches, side: str) -> Iterator[str]:
    """Yield a line for each observation that helps to explain a verdict; ``side`` is the word for the reference."""
    described = [launch.description for launch in launches]
    yield from step_growth(launches)
    yield from launch_notes([one.late_steps for one in described])
    # A setting that setup() chose differently changes times and memory.
    for launch, other in product(launches, reference):
        if key := changed_choice(launch, other):
            yield f"{key} is {launch.environment.get(key)!r}, the {side}'s {other.environment.get(key)!r}"
            break
    yield from launch_notes([one.throttled for one in described])
    if hot := [*filter(None, (other.description.throttled for other in reference))]:
        yield f"{len(hot)} of the {side}'s {counted(len(reference), 'launch')}: {hot[-1]}"
    now_mhz, before_mhz = (_known(launch.sm_clock_mhz for launch in part) for part in (launches, reference))
    if now_mhz and before_mhz and (ratio := median(now_mhz) / median(before_mhz)) < 1 - CLOCK_CHANGE:
        yield (
            f"the SM clock was {1 - ratio:.0%} lower than in the {side}: "
            f"{median(now_mhz):,.0f} against {median(before_mhz):,.0f} MHz"
        )
    memory = min(max(launch.growth_of("memory"), default=0.0) for launch in launches)
    if memory > MEMORY_GROWTH and not (reference and reference[-1].growth_of("memory")):
        yield f"memory grows within a launch by at least {memory:.1%}; look for a leak"
    usual = [parted for other in reference for parted in other.description.replicas]
    new = (next((str(parted) for parted in one.replicas if parted not in usual), "") for one in described)
    yield from dict.fromkeys(filter(None, new))


def step_growth(launches: Launches) -> Iterator[str]:
    """Yield a line on steps that get slower or faster within a launch, if they do."""
    steps = median(one.description.step_time_growth for one in launches)
    if abs(steps) > _STEP_GROWTH[launches[0].device]:
        yield f"steps get {'slower' if steps > 0 else 'faster'} within a launch by at least {abs(steps):.1%}"


def launch_notes(texts: Sequence[str]) -> list[str]:
    """Return a line for each launch that has a text; ``texts`` are in order of the launches."""
    return [f"launch {number}: {text}" for number, text in enumerate(texts, 1) if text]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _medians(launches: Launches, of: Callable[[LaunchFacts], Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each of several times over the launches that have any; a time that is absent is 0."""
    known = [times for launch in launches if (times := of(launch))]
    return {name: median(times.get(name, 0.0) for times in known) for name in sorted({*chain(*known)})}


def _lags(launches: Launches) -> list[list[float]]:
    known = [launch.rank_lag_ms for launch in launches if launch.rank_lag_ms]
    return known if len({len(lags) for lags in known}) == 1 else []


UNCHANGED = "the step's graph of streams is unchanged, so kernels or the machine changed"
# The metrics that exposed collectives explain.
_BY_EXPOSURE = ("overlap_ratio", "exposed_comm_ms")
# The metrics that slower kernels and collectives explain.
_BY_KERNELS = (*_BY_EXPOSURE, "kernel_ms", *(name for name in METRICS if name.startswith("step_time_")))


def throttled(launches: Launches) -> str:
    """Return text on launches with throttled devices, which explain a time that did not pass; empty without any."""
    num_hot = sum(bool(launch.description.throttled) for launch in launches)
    of = f"{num_hot} of {len(launches)} launches" if len(launches) > 1 else "the launch"
    return f"GPUs throttled in {of}" if num_hot else ""


def cause_of(metric: str, launches: Launches, others: Launches) -> str:
    """Return text on the cause of a regression: the exposed collective, the kernels or the host; may be empty."""
    causes = []
    if metric in _BY_EXPOSURE:
        unchanged = is_unchanged(launches, others)
        causes.append(UNCHANGED if unchanged else cause_of_schedule(launches, others))
        causes.append(_exposure(launches, others))
    if metric in _BY_KERNELS:
        causes.append(moved(launches, others))
    if metric == LATE_RANK:
        late_ms = launches[-1].late_ms
        last = late_ms.index(max(late_ms))
        causes.append(f"the others wait for rank {last}; look for what this rank alone does")
    if metric == "device_idle_ms":  # every launch has it, since the metric was compared
        now, before = (median(launch.metrics[metric] for launch in side) for side in (launches, others))
        causes.append(
            f"the host is the bottleneck: no stream is busy for {now:.3g} ms/step, was {before:.3g}; look for slower "
            "Python code, smaller kernels, waits for the device, or other load on the host"
        )
    return "; ".join(filter(None, causes))


def _exposure(launches: Launches, others: Launches) -> str:
    """Return text on the collective whose exposed time increased most from ``others`` to ``launches``.

    For each collective, the median over launches counts. The worst rank is the one that is worst in most launches. The
    text is empty if no launch has exposed times.
    """
    now, before = (_medians(side, lambda launch: launch.exposed_ms) for side in (launches, others))
    if not now:
        return ""
    kind = max(now, key=lambda name: now[name] - before.get(name, 0.0))
    was = f", was {before.get(kind, 0.0):.3g}" if before else ""
    ranks = [rank for launch in launches if (rank := launch.description.most_exposed_rank) is not None]
    worst = f"; rank {max(ranks, key=ranks.count)} worst" if ranks else ""
    return f"{kind} exposed {now[kind]:.3g} ms/step{was}{worst}"


# The least change that is named, as a fraction of the step, of the largest change, and of the change of the step.
LEAST_OF_STEP = 0.001
_LEAST_OF_LARGEST = 0.1
_LEAST_OF_CHANGE = 0.05
_MOST_NAMED = 3
# The longest wait of a late rank itself, as a fraction of its peers' wait. Of two ranks, the one that is late in two
# thirds of the calls waits half as long as the other. A rank that waits longer is late in turns with its peers.
_MOST_OWN_WAIT = 0.5
_ABSENT = FamilyTime(0.0, 0.0)


def moved(launches: Launches, others: Launches) -> str:
    """Return text on the families and collectives whose times changed from ``others`` to ``launches``.

    The text names families that increased, are new or are gone, slower transfers of collectives, and ranks that arrive
    late, unless launches of one side differ as much. It is empty if one side has no profiled steps, or if nothing
    changed by a thousandth of the step and by a twentieth of the step's own change: smaller changes do not explain the
    regression.
    """
    now_ms, before_ms = map(median_step_ms, (launches, others))
    least_ms = max(LEAST_OF_STEP * before_ms, _LEAST_OF_CHANGE * (now_ms - before_ms))
    parts = [_families(launches, others, least_ms), *_collectives(launches, others, least_ms)]
    return "; ".join(filter(None, parts))


def _clearly_above(here: Sequence[float], there: Sequence[float]) -> bool:
    """Return True if nine tenths of the values ``here`` are above nine tenths of those ``there``."""
    return sorted(here)[len(here) // 10] > sorted(there)[-1 - len(there) // 10]


def _times(launches: Launches) -> dict[str, list[FamilyTime]]:
    """Return the times of each family in each launch that has kernels."""
    known = [launch.kernels for launch in launches if launch.kernels]
    names = sorted({family for kernels in known for family in kernels if not is_communication(family)})
    return {family: [kernels.get(family, _ABSENT) for kernels in known] for family in names}


def _median_time(times: Sequence[FamilyTime]) -> FamilyTime:
    return FamilyTime(median(time.ms for time in times), median(time.calls for time in times))


def _families(launches: Launches, others: Launches, least_ms: float) -> str:
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
        now, before = ([one.ms for one in side] for side in pairs[family])
        is_clear = _clearly_above(now, before) or _clearly_above(before, now)
        if abs(changes[family]) < least_ms or not is_clear:
            continue
        kind, text = _change(family, *middles[family])
        named[kind] += 1
        if text and named[kind] <= _MOST_NAMED:
            texts.append(text)
    what = "operators" if launches[0].device == "cpu" else "kernels"
    return f"{what} per step, mean over ranks: {', '.join(texts)}" if texts else ""


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


def _collectives(launches: Launches, others: Launches, least_ms: float) -> list[str]:
    """Return a text for each collective whose transfer got slower or whose ranks wait longer for late ranks."""
    found = []
    for kind in sorted({kind for launch in launches for kind in launch.collectives}):
        here, there = (
            [side.collectives[kind] for side in part if kind in side.collectives] for part in (launches, others)
        )
        if not there:
            continue
        texts = []
        for time, said in (("transfer_ms", _transfer), ("peers_wait_ms", _late_ranks)):
            now, before = ([getattr(facts, time) for facts in side] for side in (here, there))
            if _clearly_above(now, before) and median(now) - median(before) >= least_ms:
                texts.append(said(here, there, median(now), median(before)))
        found += [f"{kind}: {', '.join(texts)}"] if texts else []
    return found


def _transfer(
    here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], now_ms: float, before_ms: float
) -> str:
    """Return text on transfers that got slower."""
    text = f"transfer {now_ms:.3g} ms/step, was {before_ms:.3g}"
    now_calls, before_calls = (median(facts.calls for facts in side) for side in (here, there))
    text += f", {_calls(now_calls)}, was {before_calls:.4g}"
    speeds = [[facts.bus_gb_per_s for facts in side if facts.bus_gb_per_s] for side in (here, there)]
    if not all(speeds):
        return text
    now_mb, before_mb = (median(facts.bus_bytes for facts in side) / 1e6 for side in (here, there))
    now_speed, before_speed = map(median, speeds)
    return f"{text}, {now_mb:.4g} MB on the bus, was {before_mb:.4g}, at {now_speed:.3g} GB/s, was {before_speed:.3g}"


def _late_ranks(
    here: Sequence[CollectiveFacts], there: Sequence[CollectiveFacts], now_ms: float, before_ms: float
) -> str:
    """Return text on the rank that arrives late, or on all ranks if they wait for each other in turns."""
    own_now_ms, own_before_ms = (median(facts.straggler_wait_ms for facts in side) for side in (here, there))
    if own_now_ms - own_before_ms > _MOST_OWN_WAIT * (now_ms - before_ms):
        return f"ranks arrive late in turns, each waits {own_now_ms:.3g} ms/step or more, was {own_before_ms:.3g}"
    rank = mode(facts.straggler for facts in here)
    return f"rank {rank} arrives late, its peers wait {now_ms:.3g} ms/step, was {before_ms:.3g}"


# The first of these metrics that regressed is split. Profiled steps say nothing about the slow steps of the tail.
SPLIT = ("step_time_p50", "step_time_p10", "step_time_mean")
_NAMES = {
    Part.COMPUTE: "compute",
    Part.STRAGGLER: "straggler's extra compute",
    Part.EXPOSED: "exposed communication",
    Part.IDLE: "device idle (host)",
}


def split(total_ms: float, launches: Launches, others: Launches) -> str:
    """Return the parts of a change in one line, in which they add up as printed; empty if a side has no breakdown.

    Each part changes by the difference of its medians over launches. Copies, and all time that profiled steps do not
    show, belong to the rest. If that is most of the change, its rank is not known either, so it is left out.
    """
    here, there = (_medians(side, lambda launch: launch.breakdown_ms) for side in (launches, others))
    if not here or not there:
        return ""
    parts_ms = {part: here.get(part, 0.0) - there.get(part, 0.0) for part in Part}
    # Three digits, and at most three decimals.
    digits = next((digits for digits, least in enumerate((100.0, 10.0, 1.0)) if abs(total_ms) >= least), 3)
    shown = {name: round(parts_ms[part], digits) for part, name in _NAMES.items()}
    total, copies = round(total_ms, digits), round(parts_ms[Part.COPY], digits)
    parts = [f"{name} {value:+.{digits}f}" for name, value in shown.items() if value]
    rest = round(total - sum(shown.values()), digits)
    parts.append(f"rest {rest:+.{digits}f}" + (f" (copies {copies:+.{digits}f})" if copies else ""))
    is_shown = abs(total_ms - sum(parts_ms.values())) <= abs(total_ms) / 2
    ranks = [rank for launch in launches if (rank := launch.description.critical_rank) is not None]
    where = f" on rank {mode(ranks)}, the critical rank" if ranks and is_shown else ""
    return f"split of {total:+.{digits}f} ms{where}: {', '.join(parts)}"


def _split_note(rows: Sequence[Verdict], launches: Launches, others: Launches) -> Iterator[str]:
    """Yield a line with the split of the first regression of step time, if there is one that can be split."""
    regressed = {row.metric: row for row in rows if row.outcome is Outcome.REGRESSION and row.delta is not None}
    match next((regressed[name] for name in SPLIT if name in regressed), None):
        case Verdict(metric=metric, value=float(value), baseline=float(baseline)):
            if text := split(value - baseline, launches, others):
                yield f"{metric}: {text}"
