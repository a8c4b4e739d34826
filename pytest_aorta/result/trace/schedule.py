"""Plays a step's graph of streams on a nominal machine: which collectives compute can hide, and how much it does. Pure.

Nothing is measured, so equal graphs have equal values on any machine. A node begins when all that it waits for has
ended, and takes the time that the machine needs for its operations or bytes. Ranks begin the step together, and a
message between two of them is not received before it is sent. Times are whole nanoseconds.

A collective is *serialized* if every matrix product of the step comes before it or after it, so that nothing can hide
it, on whatever machine. (Of a step without operators whose operations are counted, all compute counts.)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, cast

from msgspec import Meta

from pytest_aorta.common.model import Count, Milliseconds, Model
from pytest_aorta.result.trace.overlap import MAX_LANE_INTERVALS, coarsened, difference, length, union
from pytest_aorta.result.trace.profiled_steps import BUS_FACTORS, distinct
from pytest_aorta.result.trace.step_graph import Node, StepGraph, Work

_MOST_COLLECTIVES = 5000
_NS_PER_MS, _NS_PER_US = 1e6, 1e3
# Fractions of the peaks that large matrix products and large messages reach.
_OF_FLOPS, _OF_BYTES = 0.65, 0.8
# A kernel takes no less, in ns: the time from one kernel's begin to the next one's of a stream that is always full.
_LEAST_NS = 2000
# A ring of NCCL's protocol LL128 begins in this time and takes as much for each further rank of a host or of another
# one, in ns (NCCL, src/graph/tuning.cc).
_RING_NS, _HOP_NS, _NETWORK_HOP_NS = 14_000, 1900, 4000


@dataclass(frozen=True)
class Machine:
    """The peaks of a machine by its data sheet, in units a second.

    Attributes:
        flops: Dense operations of bfloat16.
        memory_bytes: Bytes to or from device memory.
        host_bytes: Bytes between host and device.
        link_bytes: Bytes from a device to the others of its host.
        network_bytes: Bytes from a device to other hosts.
        ranks_per_host: Number of devices of a host.
    """

    flops: float
    memory_bytes: float
    host_bytes: float
    link_bytes: float
    network_bytes: float
    ranks_per_host: int = 8

    def duration_ns(self, node: Node) -> int:
        """Return the time that a node takes, in nanoseconds."""
        match node.work:
            case Work.COLLECTIVE:
                return self._collective_ns(node)
            case Work.COPY:
                seconds = node.num_bytes / (_OF_BYTES * self.host_bytes)
            case Work.COMPUTE:
                seconds = max(node.flops / (_OF_FLOPS * self.flops), node.num_bytes / (_OF_BYTES * self.memory_bytes))
        return max(_LEAST_NS, round(1e9 * seconds))

    def _collective_ns(self, node: Node) -> int:
        """Return the time of a ring through all ranks of the group, the ranks of a host one after the other."""
        size = node.group_size
        hosts = -(-size // self.ranks_per_host)
        speed = min(self.link_bytes, math.inf if hosts == 1 else self.ranks_per_host * self.network_bytes)
        hops_ns = (size - hosts) * _HOP_NS + (hosts - 1) * _NETWORK_HOP_NS
        moved = node.num_bytes * (size - 1) / size
        rounds = BUS_FACTORS.get(node.name)
        if rounds is None:
            rounds, hops_ns, moved = 1, _HOP_NS, node.num_bytes
        return round(_RING_NS + rounds * (hops_ns + 1e9 * moved / (_OF_BYTES * speed)))


MACHINES = {
    "dgx-h100": Machine(989e12, 3.35e12, 64e9, 450e9, 50e9),
    "dgx-a100": Machine(312e12, 2.04e12, 32e9, 300e9, 25e9),
    "mi300x": Machine(1307e12, 5.3e12, 64e9, 448e9, 50e9),
}
NOMINAL = MACHINES["dgx-h100"]


class Issued(Model, frozen=True, omit_defaults=True):
    """A collective of a step as it was issued. It explains values and is not compared.

    Attributes:
        name: Kind of collective.
        of: Module that it belongs to; empty if unknown.
        stream: Name of its stream.
        waits_for: The last matrix product that it waits for; empty if it waits for none.
        awaited_by: The first matrix product that waits for it; empty if none does.
        serialized: Whether every matrix product comes before it or after it.
        exposed_us: Its time on the nominal machine during which nothing is computed, in microseconds.
        begin_us, end_us: When it runs there.
        behind: Name of the other stream whose work ends last of what it waits for; empty if that is its own.
        group_size: Number of ranks.
        place: Line of the user's program that issued it; empty unless a launch locates costs.
        sender: Rank that it receives from.
        late_us: How long it waits for the sender, in microseconds.
    """

    name: str
    of: str = ""
    stream: str = ""
    waits_for: str = ""
    awaited_by: str = ""
    serialized: bool = False
    exposed_us: float = 0.0
    begin_us: float = 0.0
    end_us: float = 0.0
    behind: str = ""
    group_size: Count = 1
    place: str = ""
    sender: int | None = None
    late_us: float = 0.0


class Schedule(Model, frozen=True, omit_defaults=True):
    """The step of one rank on the nominal machine.

    Attributes:
        collectives: Number of collectives.
        serialized: Number of collectives that nothing can hide.
        overlap_ratio: Fraction of the time of communication during which the rank computes.
        exposed_ms: Time of communication during which it does not, in ms.
        step_ms: Time of the step, in ms.
        issued: Each collective, in order of issue; of a baseline, in one launch alone.
        computing_us: Begins and ends of compute, for drawing; of a baseline, in the same launch alone.
        unseen: What the graph lacks, by name.
    """

    collectives: Count
    serialized: Count
    overlap_ratio: Annotated[float, Meta(ge=0, le=1)]
    exposed_ms: Milliseconds
    step_ms: Milliseconds
    issued: Annotated[list[Issued], Meta(max_length=_MOST_COLLECTIVES)] = []
    computing_us: list[tuple[float, float]] = []
    unseen: list[str] = []

    @property
    def values(self) -> Schedule:
        """Return the schedule without what explains its values."""
        return self.replace(issued=[], computing_us=[])


class ScheduleOfRanks(Model, frozen=True):
    """A schedule that several ranks have in common.

    Attributes:
        ranks: The ranks, in order.
        schedule: The schedule of each of them.
    """

    ranks: Annotated[list[Count], Meta(min_length=1)]
    schedule: Schedule

    def condensed(self) -> ScheduleOfRanks:
        """Return the schedule as a baseline stores it, in which another launch names the collectives."""
        return self.replace(schedule=self.schedule.values)


def distinct_schedules(graphs: Sequence[StepGraph | None], numbers: Sequence[int]) -> list[ScheduleOfRanks]:
    """Return the distinct schedules among those of ranks; empty unless each rank has a graph with a collective.

    ``numbers`` are the ranks that ``graphs`` belong to.
    """
    known = [graph for graph in graphs if graph and not graph.problem and _numbers(graph, Work.COLLECTIVE)]
    if len(known) < len(graphs):
        return []
    by_rank = dict(zip(numbers, known, strict=True))
    played = _played(by_rank, NOMINAL)
    schedules = [_schedule(graph, played[rank]) for rank, graph in by_rank.items()]
    return [ScheduleOfRanks(ranks, found) for found, ranks in distinct(schedules, numbers)]


def play(graph: StepGraph, machine: Machine = NOMINAL) -> Schedule:
    """Return the schedule of a graph that has a collective, whose messages from other ranks are there in time."""
    return _schedule(graph, _played({-1: graph}, machine)[-1])


class _Span(NamedTuple):
    """When a node runs, in nanoseconds, and how long it waited for the sender of what it receives."""

    begin: int
    end: int
    late: int


def _played(graphs: Mapping[int, StepGraph], machine: Machine) -> dict[int, list[_Span]]:
    """Return when the nodes of each rank run."""
    spans: dict[int, list[_Span]] = {rank: [] for rank in graphs}
    # When the messages between two ranks that are not received yet were sent.
    sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    can_wait, todo = True, sum(len(graph.nodes) for graph in graphs.values())
    while todo:
        before = todo
        for rank, own in spans.items():
            while len(own) < len(nodes := graphs[rank].nodes):
                node = nodes[len(own)]
                begin = arrives = max((own[earlier].end for earlier in node.after), default=0)
                if node.receives_from is not None and node.receives_from in graphs:
                    messages = sent[node.receives_from, rank]
                    if not messages and can_wait:
                        break
                    # Where each rank waits for another one, or a message is not in the graphs, the first goes on.
                    can_wait, arrives = True, messages.popleft() if messages else begin
                if node.sends_to is not None:
                    sent[rank, node.sends_to].append(begin)
                late = max(0, arrives - begin)
                own.append(_Span(begin + late, begin + late + machine.duration_ns(node), late))
                todo -= 1
        can_wait = todo < before
    return spans


def _schedule(graph: StepGraph, spans: Sequence[_Span]) -> Schedule:
    nodes = graph.nodes
    compute, issued = (_numbers(graph, work) for work in (Work.COMPUTE, Work.COLLECTIVE))
    products = [number for number in compute if nodes[number].flops] or compute
    before, after = _related(nodes, products)
    computing, communicating = (union(spans[number][:2] for number in numbers) for numbers in (compute, issued))
    names = _names([nodes[number] for number in products])
    exposed_ns, total_ns = length(difference(communicating, computing)), length(communicating)

    def row(number: int) -> Issued:
        node, earlier, later = nodes[number], before[number], after[number]
        begin, end, late = spans[number]
        last = nodes[max(node.after, key=lambda one: spans[one].end)].stream if node.after else node.stream
        return Issued(
            node.name,
            node.of,
            graph.streams[node.stream],
            names[earlier.bit_length() - 1] if earlier else "",
            names[(later & -later).bit_length() - 1] if later else "",
            (earlier | later).bit_count() == len(products),
            length(difference(union([(begin, end)]), computing)) / _NS_PER_US,
            begin / _NS_PER_US,
            end / _NS_PER_US,
            "" if last == node.stream else graph.streams[last],
            node.group_size,
            node.place,
            node.receives_from,
            late / _NS_PER_US,
        )

    rows = [*map(row, issued)]
    return Schedule(
        collectives=len(rows),
        serialized=sum(one.serialized for one in rows),
        overlap_ratio=round(1 - exposed_ns / total_ns, 6),
        exposed_ms=exposed_ns / _NS_PER_MS,
        step_ms=max(span.end for span in spans) / _NS_PER_MS,
        issued=rows[:_MOST_COLLECTIVES],
        computing_us=cast(
            "list[tuple[float, float]]", (coarsened(computing, MAX_LANE_INTERVALS) / _NS_PER_US).tolist()
        ),
        unseen=graph.unseen,
    )


def _names(products: Sequence[Node]) -> list[str]:
    """Return a name for each product, with its number among those of its module: backward has names of forward."""
    calls: Counter[tuple[str, str]] = Counter()
    found = []
    for node in products:
        calls[node.name, node.of] += 1
        number = calls[node.name, node.of]
        found.append(node.name + (f" of {node.of}" if node.of else "") + (f", call {number}" if number > 1 else ""))
    return found


def _numbers(graph: StepGraph, work: Work) -> list[int]:
    return [number for number, node in enumerate(graph.nodes) if node.work is work]


def _related(nodes: Sequence[Node], products: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each node which of the products come before it and after it, a bit for each."""
    bits = {number: 1 << position for position, number in enumerate(products)}
    before, after = [0] * len(nodes), [0] * len(nodes)
    for number, node in enumerate(nodes):
        for earlier in node.after:
            before[number] |= before[earlier] | bits.get(earlier, 0)
    for number in reversed(range(len(nodes))):
        for earlier in nodes[number].after:
            after[earlier] |= after[number] | bits.get(number, 0)
    return before, after
