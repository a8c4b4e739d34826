"""Waits of ranks, computed from the moments at which the ranks of one host arrive at their collectives.

gloo records when a rank arrives at a collective and not when the collective ends. A collective cannot end before its
last rank has arrived, so a rank waits at least from its own arrival to the last rank's arrival. A rank that sleeps or
computes arrives late and waits for none of this time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from pytest_aorta.common.model import Model, read_rank_file

MAX_ARRIVALS_BYTES = 16 << 20


class Arrivals(Model, frozen=True):
    """The steps and arrivals of one rank, in nanoseconds on the host's clock.

    Attributes:
        began_ns: when the rank entered each step.
        ended_ns: when the rank left each step.
        known_from_ns: the moment from which on every arrival is recorded.
        arrived_ns: when the rank arrived at each collective, by a name that is the same on every rank.
    """

    began_ns: list[int]
    ended_ns: list[int]
    known_from_ns: int
    arrived_ns: dict[str, int]


def read_arrivals(path: Path) -> Arrivals | None:
    """Read the file that a rank leaves; return None if the rank left no file.

    Raises:
        ResultError: The file is unreadable or torn.
    """
    return read_rank_file(path, Arrivals, max_bytes=MAX_ARRIVALS_BYTES)


def waits_of_ranks_ms(ranks: Sequence[Arrivals]) -> list[list[float]]:
    """Return ``wait_ms[rank][step]`` of the last steps that every rank has recorded completely.

    A step's wait is the time in which the rank has arrived at some collective of the step and another rank has not.
    Collectives between steps are part of no step.
    The lists are empty without recorded collectives, for one rank, and for ranks with unequal numbers of steps.
    """
    counts = {len(rank.began_ns) for rank in ranks}
    if len(ranks) < 2 or len(counts) > 1 or not all(rank.arrived_ns for rank in ranks):
        return [[] for _ in ranks]
    known_from_ns = max(rank.known_from_ns for rank in ranks)
    last_ns: dict[str, int] = {}
    for rank in ranks:
        for name, arrived_ns in rank.arrived_ns.items():
            last_ns[name] = max(arrived_ns, last_ns.get(name, 0))
    first = max(bisect_left(rank.began_ns, known_from_ns) for rank in ranks)
    return [_waits_ms(rank, last_ns)[first:] for rank in ranks]


def _waits_ms(rank: Arrivals, last_ns: dict[str, int]) -> list[float]:
    waits_ns = [0] * len(rank.began_ns)
    covered_ns = 0
    for arrived_ns, name in sorted((moment, name) for name, moment in rank.arrived_ns.items()):
        step = bisect_right(rank.began_ns, arrived_ns) - 1
        if step < 0 or arrived_ns > rank.ended_ns[step]:
            continue
        # A rank may wait for several collectives at once, but each moment counts once.
        end_ns = min(last_ns[name], rank.ended_ns[step])
        waits_ns[step] += max(0, end_ns - max(arrived_ns, covered_ns))
        covered_ns = max(covered_ns, end_ns)
    return [wait_ns / 1e6 for wait_ns in waits_ns]
