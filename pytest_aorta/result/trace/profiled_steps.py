"""Measurements of a rank's profiled steps: overlap, the host's head start, kernels and calls of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from pytest_aorta.common.model import Count, Milliseconds, Model, NotNegative, Positive

# Suffix of the names of overlap metrics if the host could not be ahead of the device.
AS_RUN = "_as_run"
# The blocking call that a rank reports if only another rank was blocked.
ANOTHER_RANK = "another rank"
# Lengths are whole nanoseconds, so the sum of a few of them in milliseconds is exact to far less than this.
_ROUNDING_MS = 1e-5


class Collective(StrEnum):
    """A kind of communication. The order is the one in which reports list the kinds."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"
    OTHER = "other"


CollectiveKind: TypeAlias = Annotated[str, Meta(pattern=f"^({'|'.join(Collective)})$")]


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

    step_ms: Annotated[float, Meta(gt=0)]
    compute_ms: NotNegative
    comm_ms: NotNegative
    copy_ms: NotNegative
    idle_ms: NotNegative
    hidden_comm_ms: NotNegative
    collectives: dict[CollectiveKind, CollectiveTime] = field(default_factory=dict)
    exposed_wait_ms: NotNegative = 0.0

    @property
    def exposed_comm_ms(self) -> float:
        """Return the communication during which the rank does not compute, in milliseconds."""
        return self.comm_ms - self.hidden_comm_ms

    @property
    def overlap_ratio(self) -> float | None:
        """Return the fraction of communication that compute hides; None without communication."""
        return self.hidden_comm_ms / self.comm_ms if self.comm_ms else None

    def broken_rule(self) -> str | None:
        """Return the rule of unions within one step that these lengths break; None if all rules hold."""
        beside_ms = self.compute_ms + self.exposed_comm_ms + self.exposed_wait_ms + self.idle_ms
        kinds_ms = sum(time.total_ms for time in self.collectives.values())
        excess_ms = {
            "hidden_comm_ms is more than comm_ms": self.hidden_comm_ms - self.comm_ms,
            "hidden_comm_ms is more than compute_ms": self.hidden_comm_ms - self.compute_ms,
            "comm_ms is more than step_ms": self.comm_ms - self.step_ms,
            "compute_ms, exposed communication, exposed_wait_ms and idle_ms are more than step_ms": beside_ms
            - self.step_ms,
            "compute_ms, exposed communication, exposed_wait_ms, copy_ms and idle_ms are less than step_ms": (
                self.step_ms - beside_ms - self.copy_ms
            ),
            "comm_ms is more than all its collectives": self.comm_ms - kinds_ms,
        }
        for kind, time in self.collectives.items():
            excess_ms[f"hidden_ms of {kind} is more than its total_ms"] = time.hidden_ms - time.total_ms
            excess_ms[f"{kind} is more than comm_ms"] = time.total_ms - self.comm_ms
            excess_ms[f"hidden_ms of {kind} is more than hidden_comm_ms"] = time.hidden_ms - self.hidden_comm_ms
        return next((rule for rule, excess in excess_ms.items() if excess > _ROUNDING_MS), None)


class FamilyTime(Model, frozen=True):
    """The kernels of one family in a profiled step on one rank.

    Attributes:
        ms: Sum of the kernels' durations per step in milliseconds, a mean over steps.
        calls: Number of kernels per step, a mean over steps.
    """

    ms: Milliseconds
    calls: Annotated[float, Meta(ge=0, le=1e12)]


# Time and calls of each kernel family, or of each operator on CPU ranks.
Kernels: TypeAlias = Annotated[dict[Annotated[str, Meta(min_length=1, max_length=96)], FamilyTime], Meta(max_length=64)]


@dataclass(frozen=True)
class Call:
    """A call of a collective in a process group. The attributes are those of :class:`CollectiveCalls`."""

    kind: Collective
    group: str = ""
    group_size: int | None = None
    num_bytes: int | None = None

    @property
    def key(self) -> Call:
        """Return the part of this call that is the same on all ranks of the group.

        The ranks of a group make calls with equal keys in the same order. The size is part of the key except for
        all-to-all, in which each rank may send and receive another number of bytes, e.g. if experts get unequal numbers
        of tokens.
        """
        return replace(self, num_bytes=None) if self.kind is Collective.ALL_TO_ALL else self

    def lasting(self, duration_ms: float) -> CollectiveCalls:
        """Return this call alone with its duration."""
        return CollectiveCalls(self.kind, self.group, self.group_size, self.num_bytes, [duration_ms])


class CollectiveCalls(Model, frozen=True):
    """The calls of one rank that are of one kind, group and size, in the order of all ranks of the group.

    Attributes:
        kind: Kind of :class:`Collective`.
        group: Name and ranks of the process group as torch reports them; empty if unknown.
        group_size: Number of ranks in the group; None if unknown.
        num_bytes: Size of the larger of input and output of a call in bytes, for all-to-all a mean over the calls; None
            if unknown.
        ms: Duration of each call in the profiled steps in milliseconds, in order.
    """

    kind: CollectiveKind
    group: Annotated[str, Meta(max_length=4096)]
    group_size: Positive | None
    num_bytes: Count | None
    ms: Annotated[list[NotNegative], Meta(max_length=4096)]

    @property
    def key(self) -> Call:
        """Return the key of these calls, which the calls of the group's other ranks have too."""
        return Call(Collective(self.kind), self.group, self.group_size, self.num_bytes).key


# A lane of a timeline -> ``[begin_ms, end_ms]`` of each interval, from the beginning of the step.
LaneName: TypeAlias = Annotated[str, Meta(pattern=f"^(compute|copy|wait|{'|'.join(Collective)})$")]
Timeline: TypeAlias = dict[LaneName, Annotated[list[list[NotNegative]], Meta(max_length=1000)]]


class Profile(Model, frozen=True, omit_defaults=True):
    """The profiled steps of one rank.

    Attributes:
        steps: One breakdown per step; empty if there is a ``problem``, or if no step was profiled.
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

    steps: list[StepOverlap] = field(default_factory=list)
    timeline: Timeline = field(default_factory=dict)
    head_start: HeadStart | None = None
    as_run: list[StepOverlap] = field(default_factory=list)
    kernels: Kernels = field(default_factory=dict)
    collectives: Annotated[list[CollectiveCalls], Meta(max_length=64)] = field(default_factory=list)
    problem: Annotated[str, Meta(max_length=1000)] = ""

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
