"""Separates the transfers of collectives from the waits for late ranks. Pure.

A collective's kernel runs from the arrival of its own rank to the end of the collective. The rank that arrives last
does not wait, so the shortest duration of a call over the ranks of its group is the transfer. The rest of a rank's
duration is the wait for the last rank. Clocks of ranks are not compared.

The ranks of a process group make the same calls in the same order, so the n-th calls of its ranks are one collective.
Calls of unequal sizes are distinguished first (:attr:`~pytest_aorta.result.trace.profiled_steps.Call.key`), except
where ranks may legally differ in the size of one call: in all-to-all, whose calls of a group are paired by their order
alone, and in all-gathers and reduce-scatters of lists of tensors, whose sizes count as unknown. All other collectives
of torch demand equal sizes of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from msgspec import Meta

from pytest_aorta.common.model import Count, Milliseconds, Model
from pytest_aorta.result.trace.profiled_steps import Call, Collective, CollectiveCalls

# Limits on the stored calls of a rank's collectives; the schema has the same limits.
MAX_COLLECTIVES = 64
MAX_CALLS = 4096
# With more ranks than this, the least wait and the median of the others are kept.
MAX_WAITS_BY_RANK = 8
# nccl-tests (doc/PERFORMANCE.md): bytes on the bus per byte of a call of n ranks, as a multiple of (n - 1) / n; calls
# of other collectives count as they are.
_BUS_FACTORS = {
    Collective.ALL_GATHER: 1,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_REDUCE: 2,
    Collective.ALL_TO_ALL: 1,
}

# Collectives in which every rank needs data of every other, so that no rank can end before the last has arrived.
_ENDS_TOGETHER = set(_BUS_FACTORS)


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

    calls: Annotated[float, Meta(ge=0, le=1e12)]
    bus_bytes: Annotated[float, Meta(ge=0, le=1e100)]
    transfer_ms: Milliseconds
    wait_ms: Annotated[list[Milliseconds], Meta(min_length=1, max_length=MAX_WAITS_BY_RANK)]
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
    group, all ranks are one group. A kind is left out if ranks of a group made unequal numbers of calls, or if an older
    version stored all-to-all calls by size, without their order.
    """
    served: dict[Collective, list[_Served]] = defaultdict(list)
    unmatched: set[Collective] = set()
    for call, ranks in _by_call(collectives).items():
        transfers_ms = _transfers_ms(ranks, (call.group_size or len(ranks)) if call.group else len(collectives))
        if transfers_ms is None:
            unmatched.add(call.kind)
        else:
            served[call.kind] += [_Served(rank, calls, sum(transfers_ms)) for rank, (calls,) in ranks.items()]
    return {
        str(kind): _facts(served[kind], num_steps) for kind in Collective if kind in served and kind not in unmatched
    }


def waits_ms(collectives: Sequence[Sequence[CollectiveCalls]], rank: int) -> dict[Call, list[float]]:
    """Return the waits of one rank for late ranks at the beginning of its calls, in milliseconds, in order.

    ``collectives[rank]`` are the calls of all ranks. Calls are left out if torch records no process group for them, if
    the ranks of the group made unequal numbers of calls, or if a rank can end before the last one arrives. The result's
    keys are those of calls (:attr:`~pytest_aorta.result.trace.profiled_steps.Call.key`).
    """
    found = {}
    for call, ranks in _by_call(collectives).items():
        if rank not in ranks or not call.group or call.group_size is None or call.kind not in _ENDS_TOGETHER:
            continue
        if (transfers_ms := _transfers_ms(ranks, call.group_size)) is not None:
            (own,) = ranks[rank]
            found[call] = [duration - least for duration, least in zip(own.ms, transfers_ms, strict=True)]
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


def _by_call(collectives: Sequence[Sequence[CollectiveCalls]]) -> dict[Call, dict[int, list[CollectiveCalls]]]:
    """Return each rank's entries by what the calls of a group have in common; a rank without an entry is left out."""
    found: dict[Call, dict[int, list[CollectiveCalls]]] = defaultdict(lambda: defaultdict(list))
    for rank, entries in enumerate(collectives):
        for entry in entries:
            found[entry.key][rank].append(entry)
    return found


def _transfers_ms(ranks: Mapping[int, Sequence[CollectiveCalls]], group_size: int) -> list[float] | None:
    """Return the shortest duration of each call, or None if it is not known which calls are one collective.

    All ranks of the group have to have made equally many calls, fewer than are kept, and each rank's calls have to be
    one entry, since the order of calls in several entries is not known.
    """
    each = [entries[0].ms for entries in ranks.values() if len(entries) == 1]
    counts = set(map(len, each))
    if len(ranks) != group_size or len(each) != len(ranks) or len(counts) != 1 or max(counts) >= MAX_CALLS:
        return None
    return list(map(min, zip(*each, strict=True)))


def _bus_bytes(calls: CollectiveCalls) -> float | None:
    """Return the bytes of one of the calls on the bus, a mean; None if sizes are unknown."""
    if calls.num_bytes is None or calls.group_size is None:
        return None
    factor = _BUS_FACTORS.get(calls.key.kind)
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
