"""What a launch measured: one :class:`RankResult` a rank, merged into one :class:`WorkloadResult`.

Only raw facts are kept here; statistics are derived in ``metrics.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pytest_aorta.result.gpu_facts import PlatformFacts

SCHEMA_VERSION = 2
# Kinds of communication that are told apart.
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv", "other")
# Lengths are whole nanoseconds, and so are sums of a few of them.
_ROUNDING_MS = 1e-5


@dataclass(frozen=True)
class FailureDetail:
    """One located wrong value, found by a workload's own checks.

    ``iteration`` counts from 0 over the checked iterations; ``rank`` saw the fault, ``source_rank`` sent
    the data. ``index`` is the first wrong position within the source's chunk, ``count`` how many of
    ``total`` elements were wrong. ``kind`` names the check (e.g. ``all_gather``), ``cause`` the likely fault.
    """

    kind: str
    iteration: int
    rank: int
    layer: int | None = None
    source_rank: int | None = None
    index: int | None = None
    count: int = 1
    total: int | None = None
    expected: float | None = None
    actual: float | None = None
    cause: str | None = None

    def __str__(self) -> str:
        """One line: where, how many, what was expected and what was found."""
        place = [f"iteration {self.iteration}"]
        if self.layer is not None:
            place.append(f"layer {self.layer}")
        place.append(f"on rank {self.rank}")
        if self.source_rank is not None:
            place.append(f"from source rank {self.source_rank}")
        text = f"{self.kind}: {', '.join(place)}: {self.count}"
        if self.total is not None:
            text += f" of {self.total}"
        text += " elements wrong"
        if self.index is not None:
            text += f", first at index {self.index}"
            if self.expected is not None and self.actual is not None:
                text += f": expected {self.expected:g}, got {self.actual:g}"
        return text + (f" ({self.cause})" if self.cause else "")


@dataclass(frozen=True)
class TensorHashes:
    """Hashes of named tensors in chosen steps; 128 bits each, in hex.

    Attributes:
        names: of parameters in registration order, of module boundaries in order of use.
        shapes: of each name's tensor.
        steps: measured step -> one hash a name.
    """

    names: list[str]
    shapes: list[list[int]]
    steps: dict[str, list[str]]


@dataclass(frozen=True)
class CollectiveTime:
    """A profiled step's communication of one kind on one rank, as lengths of unions of intervals.

    ``hidden_ms`` is that part of ``total_ms`` during which the rank also computes.
    """

    total_ms: float
    hidden_ms: float

    @property
    def exposed_ms(self) -> float:
        """Communication of this kind during which nothing is computed."""
        return self.total_ms - self.hidden_ms


@dataclass(frozen=True)
class StepOverlap:
    """Where one profiled step's time went on one rank: lengths of unions of intervals within the step.

    ``idle_ms`` is under none of compute, communication and copies. ``collectives`` has those of
    ``COLLECTIVES`` that the step ran; where two run at once, each counts for itself.
    """

    step_ms: float
    compute_ms: float
    comm_ms: float
    copy_ms: float
    idle_ms: float
    hidden_comm_ms: float
    collectives: dict[str, CollectiveTime] = field(default_factory=dict)

    @property
    def exposed_comm_ms(self) -> float:
        """Communication during which nothing is computed."""
        return self.comm_ms - self.hidden_comm_ms

    @property
    def overlap_ratio(self) -> float | None:
        """The share of communication that is hidden under compute; None without communication."""
        return self.hidden_comm_ms / self.comm_ms if self.comm_ms else None

    def broken_rule(self) -> str | None:
        """Which rule these lengths break that those of unions within one step can't; None where all hold."""
        beside_ms = self.compute_ms + self.exposed_comm_ms + self.idle_ms
        kinds_ms = sum(time.total_ms for time in self.collectives.values())
        excess_ms = {
            "hidden_comm_ms is more than comm_ms": self.hidden_comm_ms - self.comm_ms,
            "hidden_comm_ms is more than compute_ms": self.hidden_comm_ms - self.compute_ms,
            "comm_ms is more than step_ms": self.comm_ms - self.step_ms,
            "compute_ms, exposed communication and idle_ms are more than step_ms": beside_ms - self.step_ms,
            "compute_ms, exposed communication, copy_ms and idle_ms are less than step_ms": self.step_ms
            - beside_ms
            - self.copy_ms,
            "comm_ms is more than all its collectives": self.comm_ms - kinds_ms,
        }
        for kind, time in self.collectives.items():
            excess_ms[f"hidden_ms of {kind} is more than its total_ms"] = time.hidden_ms - time.total_ms
            excess_ms[f"{kind} is more than comm_ms"] = time.total_ms - self.comm_ms
            excess_ms[f"hidden_ms of {kind} is more than hidden_comm_ms"] = time.hidden_ms - self.hidden_comm_ms
        return next((rule for rule, excess in excess_ms.items() if excess > _ROUNDING_MS), None)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepOverlap:
        """Build from an entry of a validated document."""
        times = {kind: CollectiveTime(**time) for kind, time in data["collectives"].items()}
        return cls(**{**data, "collectives": times})


@dataclass(frozen=True)
class RankResult:
    """What one rank measured.

    Attributes:
        passed: whether the workload's own checks held on this rank.
        failure_count: wrong checks in all; ``failures`` details the first few.
        configured_iterations, total_iterations: measured steps asked for and done.
        step_times_ms: this rank's duration of each measured step, in order.
        elapsed_sec: wall time of the measured loop.
        main_work_started: whether the measured loop was entered.
        metrics: raw facts of this rank, units in their names.
        weight_hashes: step -> hash of the logical weights (the same on every rank).
        loss: the loss of each measured step, if the workload trains.
        grad_norm: the norm of each measured step's gradients before clipping, likewise.
        environment: versions and devices that numbers depend on.
        wait_ms: time in collectives, from this rank's arrival at each to its end, of each of the last steps: of all
            of them, or as many as are known.
        memory_bytes: memory in use before every tenth step.
        canary_before, canary_after: milliseconds of a fixed program beside the steps.
        tensor_hashes: of the logical ``weights``, ``gradients`` and ``optimizer`` state, tensor by tensor; the same on
            every rank.
        boundary_hashes: of what this rank's modules took and gave, ``forward`` and ``backward``.
        overlap: one entry a profiled step; empty where none was.
        timeline: lanes of the last profiled step, ``compute``, ``copy`` and the collectives' names, as
            ``[begin_ms, end_ms]`` from the step's begin; short gaps are closed where there are too many to draw.
    """

    passed: bool
    failure_count: int
    configured_iterations: int
    total_iterations: int
    step_times_ms: list[float]
    elapsed_sec: float
    main_work_started: bool = True
    failures: list[FailureDetail] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    weight_hashes: dict[str, str] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    environment: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    wait_ms: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    canary_before: dict[str, float] = field(default_factory=dict)
    canary_after: dict[str, float] = field(default_factory=dict)
    tensor_hashes: dict[str, TensorHashes] = field(default_factory=dict)
    boundary_hashes: dict[str, TensorHashes] = field(default_factory=dict)
    overlap: list[StepOverlap] = field(default_factory=list)
    timeline: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkloadResult:
    """One launch's result over all ranks; ``step_times_ms[rank][step]``, ``metrics[name][rank]``.

    ``wait_ms[rank]`` and ``memory_bytes[rank]`` are lists as in :class:`RankResult`; ``canary_before[name][rank]``
    and ``canary_after`` are empty where the workload has no process group then. ``boundary_hashes[rank]``,
    ``overlap[rank][profiled step]`` and ``timeline[rank]`` are empty where no rank has any. Where an adapter reads what
    rank 0 alone has logged, lists by rank have its entry only. ``profiler`` is what the ranks ran under;
    ``platform_facts``, what their devices did, are None on CPU ranks.
    """

    schema_version: int
    workload: str
    config: dict[str, Any]
    world_size: int
    device: str
    backend: str
    platform: str
    launcher: str
    passed: bool
    failure_count: int
    first_failure_iteration: int | None
    failure_details: list[FailureDetail]
    configured_iterations: int
    total_iterations: int
    main_work_started: bool
    elapsed_sec: float
    step_times_ms: list[list[float]]
    metrics: dict[str, list[float]]
    weight_hashes: dict[str, str]
    loss: list[float]
    environment: dict[str, Any]
    launch_times_s: dict[str, float]
    wait_ms: list[list[float]]
    memory_bytes: list[list[int]]
    canary_before: dict[str, list[float]]
    canary_after: dict[str, list[float]]
    grad_norm: list[float] = field(default_factory=list)
    tensor_hashes: dict[str, TensorHashes] = field(default_factory=dict)
    boundary_hashes: list[dict[str, TensorHashes]] = field(default_factory=list)
    profiler: str | None = None
    platform_facts: PlatformFacts | None = None
    overlap: list[list[StepOverlap]] = field(default_factory=list)
    timeline: list[dict[str, list[list[float]]]] = field(default_factory=list)

    @property
    def step_times_max_ms(self) -> list[float]:
        """The maximum over ranks of each step's time."""
        return [max(times) for times in zip(*self.step_times_ms, strict=True)]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkloadResult:
        """Build from a document that was validated against the schema."""
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        values["failure_details"] = [FailureDetail(**detail) for detail in data["failure_details"]]
        values["tensor_hashes"] = _hashes_from_json(data.get("tensor_hashes", {}))
        values["boundary_hashes"] = [_hashes_from_json(rank) for rank in data.get("boundary_hashes", [])]
        if values.get("platform_facts") is not None:
            values["platform_facts"] = PlatformFacts.from_json(values["platform_facts"])
        values["overlap"] = [[StepOverlap.from_json(step) for step in rank] for rank in data.get("overlap", [])]
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The document that the schema describes, which has lists for tuples."""
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document


def _hashes_from_json(data: Mapping[str, Any]) -> dict[str, TensorHashes]:
    return {kind: TensorHashes(**hashes) for kind, hashes in data.items()}
