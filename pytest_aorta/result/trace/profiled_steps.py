"""Measurements of a rank's profiled steps: overlap, transfers of collectives without waits, and counted costs. Pure.

A collective's kernel runs from the arrival of its own rank to the end of the collective. The rank that arrives last
does not wait, so the shortest duration of a call over the ranks of its group is the transfer. The rest of a rank's
duration is the wait for the last rank. Clocks of ranks are not compared.

The ranks of a process group make the same calls in the same order, so the n-th calls of its ranks are one collective.
Calls of unequal sizes are distinguished first (:attr:`Call.key`), except
where ranks may legally differ in the size of one call: in all-to-all, whose calls of a group are paired by their order
alone, and in all-gathers and reduce-scatters of lists of tensors, whose sizes count as unknown. All other collectives
of torch demand equal sizes of all ranks.

Costs are those of one step, which repeat to the last unit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TypeAlias, TypeVar

from pytest_aorta.common.model import Count, Milliseconds, Model, NotNegative, Positive
from pytest_aorta.result.trace.step_graph import StepGraph

T = TypeVar("T")
# Suffix of the names of overlap metrics if the host could not be ahead of the device.
AS_RUN = "_as_run"
# The blocking call that a rank reports if only another rank was blocked.
ANOTHER_RANK = "another rank"


class Collective(StrEnum):
    """A kind of communication. The order is the one in which reports list the kinds."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"
    OTHER = "other"


class CollectiveTime(Model, frozen=True):
    """The communication of one kind in a profiled step on one rank, as lengths of unions of intervals.

    Attributes:
        total_ms: Time during which a collective of this kind runs, in milliseconds.
        hidden_ms: The part of ``total_ms`` during which the rank also computes.
    """

    total_ms: NotNegative
    hidden_ms: NotNegative

    @property
    def exposed_ms(self) -> float:
        """Return the communication of this kind during which the rank does not compute, in milliseconds."""
        return self.total_ms - self.hidden_ms


class HeadStart(Model, frozen=True):
    """Lead of the host over the device in the profiled steps of one rank, which are captured a few at a time.

    Attributes:
        lead_ms: Longest time that a spin kernel held the device back, in milliseconds.
        attempts: Largest number of captures of some steps until the lead sufficed or no longer lead was allowed.
        step_ratio: The median of the steps that were captured at once, the longest one, divided by the median timed
            step; None if none was timed.
        succeeded: Whether the steps of the capture ran without delay by the host.
        blocked_by: The runtime call in which the host waits for the device in each step, and because of which it could
            not be ahead; None if there is none.
        late_steps: Number of further steps that do not count, since the host was late in all attempts to capture them.
    """

    lead_ms: NotNegative
    attempts: Positive
    step_ratio: NotNegative | None
    succeeded: bool
    blocked_by: str | None = None
    late_steps: Count = 0


class StepOverlap(Model, frozen=True):
    """The breakdown of one profiled step's time on one rank, as lengths of unions of intervals within the step.

    Lengths are in milliseconds.

    Attributes:
        step_ms: Length of the step.
        compute_ms: Time of kernels that are neither communication nor copies, on any stream.
        comm_ms: Time of communication, without waits for late ranks where these are known.
        copy_ms: Time of copies and memsets.
        idle_ms: Time without compute, communication, waits and copies.
        hidden_comm_ms: Communication during which the rank also computes.
        collectives: Kind of :class:`Collective` -> :class:`CollectiveTime`, for each kind that the step ran; if two
            kinds run at once, each counts in full.
        exposed_wait_ms: Time in collectives before the last rank arrives, during which the rank neither computes nor
            communicates; 0 where waits are not separated from communication.
    """

    step_ms: NotNegative
    compute_ms: NotNegative
    comm_ms: NotNegative
    copy_ms: NotNegative
    idle_ms: NotNegative
    hidden_comm_ms: NotNegative
    collectives: dict[str, CollectiveTime] = {}
    exposed_wait_ms: NotNegative = 0.0

    @property
    def exposed_comm_ms(self) -> float:
        """Return the communication during which the rank does not compute, in milliseconds."""
        return self.comm_ms - self.hidden_comm_ms

    @property
    def overlap_ratio(self) -> float | None:
        """Return the fraction of communication that compute hides; None without communication."""
        return self.hidden_comm_ms / self.comm_ms if self.comm_ms else None


class FamilyTime(Model, frozen=True):
    """The kernels of one family in a profiled step on one rank.

    Attributes:
        ms: Sum of the kernels' durations per step in milliseconds, a mean over steps.
        calls: Number of kernels per step, a mean over steps.
    """

    ms: Milliseconds
    calls: NotNegative


# Time and calls of each kernel family, or of each operator on CPU ranks.
Kernels: TypeAlias = dict[str, FamilyTime]


class Call(Model, frozen=True):
    """A call of a collective in a process group. The attributes are those of :class:`CollectiveCalls`."""

    kind: Collective
    group: str
    group_size: Positive | None
    num_bytes: Count | None

    @property
    def key(self) -> Call:
        """Return the part of this call that is the same on all ranks of the group.

        The ranks of a group make calls with equal keys in the same order. The size is part of the key except for
        all-to-all, in which each rank may send and receive another number of bytes, e.g. if experts get unequal numbers
        of tokens.
        """
        num_bytes = None if self.kind == Collective.ALL_TO_ALL else self.num_bytes
        return Call(self.kind, self.group, self.group_size, num_bytes)

    def lasting(self, duration_ms: float) -> CollectiveCalls:
        """Return this call alone with its duration."""
        return CollectiveCalls(self.kind, self.group, self.group_size, self.num_bytes, [duration_ms])


class CollectiveCalls(Call, frozen=True):
    """The calls of one rank that are of one kind, group and size, in the order of all ranks of the group.

    Attributes:
        kind: Kind of collective.
        group: Name and ranks of the process group as torch reports them; empty if unknown.
        group_size: Number of ranks in the group; None if unknown.
        num_bytes: Size of the larger of input and output of a call in bytes, for all-to-all a mean over the calls; None
            if unknown.
        ms: Duration of each call in the profiled steps in milliseconds, in order.
    """

    ms: list[NotNegative]


# A lane of a timeline -> ``[begin_ms, end_ms]`` of each interval, from the beginning of the step.
Timeline: TypeAlias = dict[str, list[list[NotNegative]]]


class Profile(Model, frozen=True, omit_defaults=True):
    """The profiled steps of one rank.

    Attributes:
        steps: One breakdown per step, of workloads those of ``as_run`` if a head start was tried and failed; empty if
            there is a ``problem``, or if no step was profiled.
        timeline: Lanes of the last profiled step, ``compute``, ``copy``, ``wait`` and the collectives' names, as
            ``[begin_ms, end_ms]`` from the beginning of the step; if a lane has too many intervals to draw, the
            shortest gaps are closed.
        head_start: Lead of the host in the profiled steps; None on CPU ranks and if no step was profiled.
        as_run: Breakdowns of the same steps without a head start; empty on CPU ranks.
        kernels: Time and calls per profiled step of each kernel family, or on CPU ranks of each operator without the
            operators that it calls; at most 64 entries: if there are more, the last one sums the shortest.
        collectives: The calls of collectives in the profiled steps.
        problem: The reason why steps were profiled without a result; empty if ``steps`` has entries or no step was
            profiled.
    """

    steps: list[StepOverlap] = []
    timeline: Timeline = {}
    head_start: HeadStart | None = None
    as_run: list[StepOverlap] = []
    kernels: Kernels = {}
    collectives: list[CollectiveCalls] = []
    problem: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the overlap metrics of the steps, and ``device_idle_ms`` of the steps as they run; none without steps.

        If a head start was tried and failed, the steps show the host's delay. The overlap metrics are then those of the
        steps as they run, with ``_as_run`` after their names, so that nothing compares them with a baseline.
        """
        if not self.steps:
            return {}
        suffix = AS_RUN if self.head_start and not self.head_start.succeeded else ""
        found = {
            f"{name}{suffix}": value for name, value in _overlap_metrics(self.as_run if suffix else self.steps).items()
        }
        if self.as_run:
            found["device_idle_ms"] = median(step.idle_ms for step in self.as_run)
        return found


def _overlap_metrics(steps: Sequence[StepOverlap]) -> dict[str, float]:
    """Return ``exposed_comm_ms``, a mean over steps, and ``overlap_ratio`` over all steps if they communicate."""
    exposed_ms = sum(step.exposed_comm_ms for step in steps)
    comm_ms = sum(step.comm_ms for step in steps)
    found = {"exposed_comm_ms": exposed_ms / len(steps)}
    return found | ({"overlap_ratio": (comm_ms - exposed_ms) / comm_ms} if comm_ms else {})


# Limits on the stored calls of a rank's collectives; the schema has the same limits.
MAX_COLLECTIVES = 64
MAX_CALLS = 4096
# With more ranks than this, the least wait and the median of the others are kept.
MAX_WAITS_BY_RANK = 8
# nccl-tests (doc/PERFORMANCE.md): bytes on the bus per byte of a call of n ranks, as a multiple of (n - 1) / n; calls
# of other collectives count as they are.
BUS_FACTORS: dict[str, int] = {
    Collective.ALL_GATHER: 1,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_REDUCE: 2,
    Collective.ALL_TO_ALL: 1,
}

# Collectives in which every rank needs data of every other, so that no rank can end before the last has arrived.
_ENDS_TOGETHER = set(BUS_FACTORS)


class CollectiveFacts(Model, frozen=True):
    """The calls of one collective in a profiled step.

    Attributes:
        calls: Calls of a rank per step, a mean over ranks.
        bus_bytes: Bytes that the calls of a rank move over the bus per step, by nccl-tests' formula, a mean over ranks;
            0 if sizes are unknown.
        transfer_ms: Time of a rank's calls per step without waits for late ranks, a mean over ranks.
        wait_ms: Time that each rank that makes such calls waits for late ranks per step, in the order of ranks; of more
            than 8 ranks the least wait and the median of the others.
        straggler: The rank that the others wait for.
    """

    calls: NotNegative
    bus_bytes: NotNegative
    transfer_ms: Milliseconds
    wait_ms: list[Milliseconds]
    straggler: Count

    @property
    def bus_gb_per_s(self) -> float | None:
        """Return the bus bandwidth of the transfers in 10^9 bytes per second; None if sizes are unknown."""
        return self.bus_bytes / self.transfer_ms / 1e6 if self.bus_bytes and self.transfer_ms else None

    @property
    def peers_wait_ms(self) -> float:
        """Return the median wait of the ranks other than the straggler, in ms per step; 0 for one rank."""
        return median(sorted(self.wait_ms)[1:] or [0.0])

    @property
    def straggler_wait_ms(self) -> float:
        """Return the wait of the straggler itself, the least of any rank, in ms per step."""
        return min(self.wait_ms)


@dataclass(frozen=True)
class _Served:
    """The calls of one rank with one key, and the time of their transfers."""

    rank: int
    calls: CollectiveCalls
    transfer_ms: float


def collective_facts(collectives: Sequence[Sequence[CollectiveCalls]], num_steps: int) -> dict[str, CollectiveFacts]:
    """Return the facts of each kind of collective from ``collectives[rank]``.

    The n-th calls of the ranks of one process group with equal keys are one collective. If torch records no process
    group, all ranks are one group. A kind is left out if ranks of a group made unequal numbers of calls.
    """
    served: dict[Collective, list[_Served]] = defaultdict(list)
    unmatched: set[Collective] = set()
    for call, ranks in _by_call(collectives).items():
        transfers_ms = _transfers_ms(ranks, (call.group_size or len(ranks)) if call.group else len(collectives))
        if transfers_ms is None:
            unmatched.add(call.kind)
        else:
            served[call.kind] += [_Served(rank, calls, sum(transfers_ms)) for rank, calls in ranks.items()]
    return {
        str(kind): _facts(served[kind], num_steps) for kind in Collective if kind in served and kind not in unmatched
    }


def waits_ms(collectives: Sequence[Sequence[CollectiveCalls]], rank: int) -> dict[Call, list[float]]:
    """Return the waits of one rank for late ranks at the beginning of its calls, in milliseconds, in order.

    ``collectives[rank]`` are the calls of all ranks. Calls are left out if torch records no process group for them, if
    the ranks of the group made unequal numbers of calls, or if a rank can end before the last one arrives. The result's
    keys are those of calls (:attr:`Call.key`).
    """
    found = {}
    for call, ranks in _by_call(collectives).items():
        if rank not in ranks or not call.group or call.group_size is None or call.kind not in _ENDS_TOGETHER:
            continue
        if (transfers_ms := _transfers_ms(ranks, call.group_size)) is not None:
            found[call] = [duration - least for duration, least in zip(ranks[rank].ms, transfers_ms, strict=True)]
    return found


def joined_calls(parts: Sequence[Sequence[CollectiveCalls]]) -> list[CollectiveCalls]:
    """Return the calls that one rank made one after the other, those of equal keys in one entry, the longest first.

    At most :data:`MAX_CALLS` calls of a key are kept, the first ones, and the :data:`MAX_COLLECTIVES` longest keys.
    Sizes are means over all calls.
    """
    found: dict[Call, list[CollectiveCalls]] = defaultdict(list)
    for part in parts:
        for calls in part:
            found[calls.key].append(calls)
    every = [_joined(same) for same in found.values()]
    every.sort(key=lambda calls: -sum(calls.ms))
    return [calls.replace(ms=calls.ms[:MAX_CALLS]) for calls in every[:MAX_COLLECTIVES]]


def _joined(same: Sequence[CollectiveCalls]) -> CollectiveCalls:
    durations_ms = [duration for calls in same for duration in calls.ms]
    sizes = [calls.num_bytes * len(calls.ms) for calls in same if calls.num_bytes is not None]
    num_bytes = sum(sizes) // len(durations_ms) if len(sizes) == len(same) else None
    return same[0].replace(num_bytes=num_bytes, ms=durations_ms)


def _by_call(collectives: Sequence[Sequence[CollectiveCalls]]) -> dict[Call, dict[int, CollectiveCalls]]:
    """Return each rank's entry by what the calls of a group have in common; a rank without an entry is left out."""
    found: dict[Call, dict[int, CollectiveCalls]] = defaultdict(dict)
    for rank, entries in enumerate(collectives):
        for entry in entries:
            found[entry.key][rank] = entry
    return found


def _transfers_ms(ranks: Mapping[int, CollectiveCalls], group_size: int) -> list[float] | None:
    """Return the shortest duration of each call, or None if it is not known which calls are one collective.

    All ranks of the group have to have made equally many calls, fewer than are kept.
    """
    counts = {len(calls.ms) for calls in ranks.values()}
    if len(ranks) != group_size or len(counts) != 1 or max(counts) >= MAX_CALLS:
        return None
    return list(map(min, zip(*(calls.ms for calls in ranks.values()), strict=True)))


def _bus_bytes(calls: CollectiveCalls) -> float | None:
    """Return the bytes of one of the calls on the bus, a mean; None if sizes are unknown."""
    if calls.num_bytes is None or calls.group_size is None:
        return None
    factor = BUS_FACTORS.get(calls.kind)
    return calls.num_bytes * (1.0 if factor is None else factor * (calls.group_size - 1) / calls.group_size)


def _facts(served: Sequence[_Served], num_steps: int) -> CollectiveFacts:
    waits_ms: dict[int, float] = dict.fromkeys(sorted({entry.rank for entry in served}), 0.0)
    for entry in served:
        waits_ms[entry.rank] += (sum(entry.calls.ms) - entry.transfer_ms) / num_steps
    each = len(waits_ms) * num_steps
    bus_bytes = [(_bus_bytes(entry.calls), len(entry.calls.ms)) for entry in served]
    known = [size * count for size, count in bus_bytes if size is not None]
    least_ms, *others_ms = sorted(waits_ms.values())
    return CollectiveFacts(
        calls=sum(len(entry.calls.ms) for entry in served) / each,
        bus_bytes=sum(known) / each if len(known) == len(served) else 0.0,
        transfer_ms=sum(entry.transfer_ms for entry in served) / each,
        wait_ms=list(waits_ms.values()) if len(waits_ms) <= MAX_WAITS_BY_RANK else [least_ms, median(others_ms)],
        straggler=min(waits_ms, key=waits_ms.__getitem__),
    )


# The name of an operator, a kernel family or a call of the device's runtime -> a number per step.
Counts: TypeAlias = dict[str, Count]


class Cost(StrEnum):
    """A kind of cost. Each is a metric of the same name."""

    COLLECTIVES = "collectives"
    COLLECTIVE_BYTES = "collective_bytes"
    FLOPS = "flops"
    OPERATORS = "operators"
    KERNELS = "kernels"
    HOST_SYNCS = "host_syncs"
    HOST_COPIES = "host_copies"
    COMPILED_GRAPHS = "compiled_graphs"
    RECOMPILATIONS = "recompilations"
    GRAPH_BREAKS = "graph_breaks"


class CollectiveCost(Model, frozen=True, omit_defaults=True):
    """The calls of one kind of collective in groups of one size and on one type of elements.

    Attributes:
        kind: Kind of :class:`~pytest_aorta.result.trace.profiled_steps.Collective`; for ``other``, torch's name for it.
        calls: Number of calls of this rank in the step.
        group_size: Number of ranks in the group; None if unknown.
        dtype: Type of the elements, such as ``bfloat16``; empty if unknown.
        bytes: Sum over the calls of the larger of input and output; None if unknown.
    """

    kind: str
    calls: Positive
    group_size: Positive | None = None
    dtype: str = ""
    bytes: Count | None = None

    def __str__(self) -> str:
        """Return what distinguishes the calls from others, such as ``all_gather over 2 ranks, bfloat16``."""
        ranks = "" if self.group_size is None else f" over {self.group_size} ranks"
        return f"{self.kind}{ranks}" + (f", {self.dtype}" if self.dtype else "")


class Costs(Model, frozen=True, omit_defaults=True):
    """The costs of one step of one rank.

    Attributes:
        collectives: The calls of collectives, with at most one entry for each kind, size of group and type.
        flops: Floating-point operations by operator; a multiplication and an addition are two operations.
        operators: Calls by operator, with those that operators make.
        kernels: Kernels by family; None on CPU ranks.
        host_syncs: Calls of the device's runtime in which the host waits for the device; None on CPU ranks.
        host_copies: Copies to the host; on CPU ranks values that Python reads from tensors, as ``.item()`` does.
        compiled_graphs: Graphs that torch.compile compiled before the measured steps; None if this was not counted.
        recompilations: Compilations of torch.compile after the warm-up steps; None if this was not counted.
        graph_breaks: Graph breaks of torch.compile since the rank began; None if this was not counted.
        without_flops: Calls by operator for which no formula of operations is known.
        places: Cost -> part -> place in the user's program -> number, most first; empty where a debugger runs.
        graph: The step's graph of streams; None if none was recorded.
        problem: The reason why nothing was counted; empty if the step was counted.
    """

    collectives: list[CollectiveCost] = []
    flops: Counts = {}
    operators: Counts = {}
    kernels: Counts | None = None
    host_syncs: Counts | None = None
    host_copies: Counts = {}
    compiled_graphs: Count | None = None
    recompilations: Count | None = None
    graph_breaks: Count | None = None
    without_flops: Counts = {}
    places: dict[Cost, dict[str, Counts]] = {}
    graph: StepGraph | None = None
    problem: str = ""

    def counts(self, cost: Cost) -> dict[str, int] | None:
        """Return the parts of a cost by name; None if they were not counted, e.g. kernels of CPU ranks."""
        if self.problem:
            return None
        match cost:
            case Cost.COLLECTIVES:
                return {str(row): row.calls for row in self.collectives}
            case Cost.COLLECTIVE_BYTES:
                return {str(row): row.bytes for row in self.collectives if row.bytes is not None}
            case Cost.COMPILED_GRAPHS | Cost.RECOMPILATIONS | Cost.GRAPH_BREAKS:
                value: int | None = getattr(self, cost)
                return None if value is None else {str(cost): value} if value else {}
            case _:
                found: dict[str, int] | None = getattr(self, cost)
                return found


def joined_costs(parts: Sequence[Costs]) -> Costs:
    """Return the costs of several steps of one rank, added up; compilations are those of the rank, not of a step."""
    if problem := next((part.problem for part in parts if part.problem), ""):
        return Costs(problem=problem)
    sums = {
        name: dict(sum((Counter(getattr(part, name)) for part in parts), Counter()))
        for name in ("flops", "operators", "kernels", "host_syncs", "host_copies", "without_flops")
        if getattr(parts[0], name) is not None
    }
    places: dict[Cost, dict[str, Counts]] = {}
    for cost, named in (item for part in parts for item in part.places.items()):
        own = places.setdefault(cost, {})
        own |= {name: dict(Counter(own.get(name, {})) + Counter(found)) for name, found in named.items()}
    collectives = joined_collectives(row for part in parts for row in part.collectives)
    return parts[0].replace(collectives=collectives, places=places, **sums)


def joined_collectives(calls: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """Return calls added up, those of each kind, size of group and type in one row."""
    rows: dict[str, list[CollectiveCost]] = defaultdict(list)
    for call in calls:
        rows[str(call)].append(call)
    sizes = {name: [row.bytes for row in same if row.bytes is not None] for name, same in rows.items()}
    return [
        same[0].replace(
            calls=sum(row.calls for row in same), bytes=sum(sizes[name]) if len(sizes[name]) == len(same) else None
        )
        for name, same in sorted(rows.items())
    ]


class CostsOfRanks(Model, frozen=True):
    """Costs that several ranks have in common.

    Attributes:
        ranks: The ranks, in order.
        costs: The costs of a step of each of them.
    """

    ranks: list[Count]
    costs: Costs


def distinct_costs(costs: Sequence[Costs | None], numbers: Sequence[int]) -> list[CostsOfRanks]:
    """Return the distinct costs among those of ranks, without graphs; empty if a rank has none.

    ``numbers`` are the ranks that ``costs`` belong to.
    """
    known = [own.replace(graph=None) for own in costs if own]
    if len(known) < len(costs):
        return []
    return [CostsOfRanks(ranks, own) for own, ranks in distinct(known, numbers)]


def distinct(values: Sequence[T], numbers: Sequence[int]) -> list[tuple[T, list[int]]]:
    """Return the distinct values, each with the ranks that have it, in order of these; ``numbers`` are all ranks."""
    found: list[tuple[T, list[int]]] = []
    for rank, value in zip(numbers, values, strict=True):
        same = next((ranks for other, ranks in found if other == value), None)
        if same is None:
            found.append((value, [rank]))
        else:
            same.append(rank)
    return sorted(found, key=lambda group: group[1])


def by_rank(groups: Sequence[CostsOfRanks], cost: Cost) -> dict[int, dict[str, int]] | None:
    """Return the parts of a cost on each rank; None if a rank has none."""
    found: dict[int, dict[str, int]] = {}
    for group in groups:
        if (counts := group.costs.counts(cost)) is None:
            return None
        found |= dict.fromkeys(group.ranks, counts)
    return found or None
