"""Costs of a step that repeat to the last unit: counts of one profiled step of one rank, and the rules to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from pytest_aorta.common.model import Count, Model, Positive
from pytest_aorta.result.trace.profiled_steps import CollectiveKind

# The name of an operator, a kernel family or a call of the device's runtime -> a number per step.
Counts: TypeAlias = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=200)], Count], Meta(max_length=20_000)]


class Cost(StrEnum):
    """A kind of cost. Each is a metric of the same name."""

    COLLECTIVES = "collectives"
    COLLECTIVE_BYTES = "collective_bytes"
    FLOPS = "flops"
    OPERATORS = "operators"
    KERNELS = "kernels"
    HOST_SYNCS = "host_syncs"
    HOST_COPIES = "host_copies"
    RECOMPILATIONS = "recompilations"
    GRAPH_BREAKS = "graph_breaks"


class CollectiveCost(Model, frozen=True, omit_defaults=True):
    """The calls of one kind of collective in groups of one size and on one type of elements.

    Attributes:
        kind: Kind of :class:`~pytest_aorta.result.trace.profiled_steps.Collective`.
        calls: Number of calls of this rank in the step.
        group_size: Number of ranks in the group; None if unknown.
        dtype: Type of the elements, such as ``bfloat16``; empty if unknown.
        bytes: Sum over the calls of the larger of input and output; None if unknown.
        group: Names of the process groups, for messages only; empty if unknown.
    """

    kind: CollectiveKind
    calls: Positive
    group_size: Positive | None = None
    dtype: Annotated[str, Meta(max_length=40)] = ""
    bytes: Count | None = None
    group: Annotated[str, Meta(max_length=400)] = ""

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
        recompilations: Compilations of torch.compile after the warm-up steps; None if this was not counted.
        graph_breaks: Graph breaks of torch.compile since the rank began; None if this was not counted.
        without_flops: Calls by operator for which no formula of operations is known.
        places: Cost -> part -> place in the user's program -> number; empty unless a launch locates costs.
        problem: The reason why nothing was counted; empty if the step was counted.
    """

    collectives: Annotated[list[CollectiveCost], Meta(max_length=1000)] = field(default_factory=list)
    flops: Counts = field(default_factory=dict)
    operators: Counts = field(default_factory=dict)
    kernels: Counts | None = None
    host_syncs: Counts | None = None
    host_copies: Counts = field(default_factory=dict)
    recompilations: Count | None = None
    graph_breaks: Count | None = None
    without_flops: Counts = field(default_factory=dict)
    places: dict[Cost, dict[str, Counts]] = field(default_factory=dict)
    problem: Annotated[str, Meta(max_length=1000)] = ""

    def counts(self, cost: Cost) -> dict[str, int] | None:
        """Return the parts of a cost by name; None if they were not counted, e.g. kernels of CPU ranks."""
        if self.problem:
            return None
        match cost:
            case Cost.COLLECTIVES:
                return {str(row): row.calls for row in self.collectives}
            case Cost.COLLECTIVE_BYTES:
                return {str(row): row.bytes for row in self.collectives if row.bytes is not None}
            case Cost.RECOMPILATIONS | Cost.GRAPH_BREAKS:
                value = self.recompilations if cost is Cost.RECOMPILATIONS else self.graph_breaks
                return None if value is None else {str(cost): value} if value else {}
            case _:
                found: dict[str, int] | None = getattr(self, cost)
                return found


def joined(parts: Sequence[Costs]) -> Costs:
    """Return the costs of several steps of one rank, added up; compilations are those of the rank, not of a step."""
    if problem := next((part.problem for part in parts if part.problem), ""):
        return Costs(problem=problem)
    rows: dict[str, CollectiveCost] = {}
    for row in (row for part in parts for row in part.collectives):
        if (known := rows.get(str(row))) is not None:
            num_bytes = None if known.bytes is None or row.bytes is None else known.bytes + row.bytes
            rows[str(row)] = known.replace(calls=known.calls + row.calls, bytes=num_bytes)
        else:
            rows[str(row)] = row
    sums = {
        name: dict(sum((Counter(getattr(part, name)) for part in parts), Counter()))
        for name in ("flops", "operators", "kernels", "host_syncs", "host_copies", "without_flops")
        if getattr(parts[0], name) is not None
    }
    places: dict[Cost, dict[str, Counts]] = {}
    for cost, named in (item for part in parts for item in part.places.items()):
        own = places.setdefault(cost, {})
        own |= {name: dict(Counter(own.get(name, {})) + Counter(found)) for name, found in named.items()}
    return parts[0].replace(collectives=list(rows.values()), places=places, **sums)


class CostsOfRanks(Model, frozen=True):
    """Costs that several ranks have in common.

    Attributes:
        ranks: The ranks, in order.
        costs: The costs of a step of each of them.
    """

    ranks: Annotated[list[Count], Meta(min_length=1)]
    costs: Costs


def distinct(costs: Sequence[Costs | None], numbers: Sequence[int]) -> list[CostsOfRanks]:
    """Return the distinct costs among those of ranks, without names of groups; empty if a rank has none.

    ``numbers`` are the ranks that ``costs`` belong to.
    """
    ranks: list[tuple[Costs, list[int]]] = []
    for rank, own in zip(numbers, costs, strict=True):
        if own is None:
            return []
        own = own.replace(collectives=[row.replace(group="") for row in own.collectives])
        same = next((others for found, others in ranks if found == own), None)
        if same is None:
            ranks.append((own, [rank]))
        else:
            same.append(rank)
    return [CostsOfRanks(others, found) for found, others in ranks]


def by_rank(groups: Sequence[CostsOfRanks], cost: Cost) -> dict[int, dict[str, int]] | None:
    """Return the parts of a cost on each rank; None if a rank has none."""
    found: dict[int, dict[str, int]] = {}
    for group in groups:
        if (counts := group.costs.counts(cost)) is None:
            return None
        found |= dict.fromkeys(group.ranks, counts)
    return found or None
