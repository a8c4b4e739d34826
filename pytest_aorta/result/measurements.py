"""Measurements of a launch: one :class:`RankResult` per rank, merged into one :class:`WorkloadResult`.

Results contain raw facts only; ``facts.py`` condenses them into statistics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.gpu_facts import PlatformFacts
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.result.trace.profiled_steps import CollectiveCalls, FamilyTime, HeadStart, StepOverlap

if TYPE_CHECKING:  # ranks import this module, and need no plan
    from pytest_aorta.plan.launch_plan import LaunchRequest
    from pytest_aorta.plan.reference import AnyReference

SCHEMA_VERSION = 3
# With fewer steps the 99th percentile is the largest or second-largest value.
MIN_STEPS_P99 = 100
# Prefix of metrics whose value over ranks is the maximum; for every other metric it is the mean.
_PEAK = "peak_"
# The fact about a rank whose Python code was traced, e.g. by coverage. Other ranks do not have the fact.
PYTHON_TRACER = "python_tracer"


@dataclass(frozen=True)
class FailureDetail:
    """A located wrong value, found by a workload's own checks.

    Attributes:
        kind: the check that failed, e.g. ``all_gather``.
        iteration: the checked iteration, counted from 0.
        rank: the rank that found the wrong value.
        layer: the layer, if the check works layer by layer.
        source_rank: the rank that sent the data.
        index: the first wrong position within the source rank's chunk.
        count: number of wrong elements.
        total: number of elements that were checked.
        expected: the right value at ``index``.
        actual: the value that was found at ``index``.
        cause: the likely fault.
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
        """Return one line with the location, the number of wrong elements, the expected and the actual value."""
        location = [f"iteration {self.iteration}"]
        if self.layer is not None:
            location.append(f"layer {self.layer}")
        location.append(f"on rank {self.rank}")
        if self.source_rank is not None:
            location.append(f"from source rank {self.source_rank}")
        text = f"{self.kind}: {', '.join(location)}: {self.count}"
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
    """Hashes of named tensors in chosen steps, each of 128 bits and written in hex.

    Attributes:
        names: parameters in the order of their registration, or module boundaries in the order of their use.
        shapes: the shape of each named tensor.
        steps: measured step -> one hash per name.
    """

    names: list[str]
    shapes: list[list[int]]
    steps: dict[str, list[str]]


@dataclass(frozen=True)
class RankResult:
    """The measurements of one rank.

    Attributes:
        passed: whether the workload's own checks held on this rank.
        failure_count: number of failed checks; ``failures`` details the first few.
        configured_iterations: measured steps that were requested.
        total_iterations: measured steps that were done.
        step_times_ms: this rank's duration of each measured step, in order.
        elapsed_sec: wall time of the measured loop, in seconds.
        main_work_started: whether the measured loop was entered.
        metrics: raw facts of this rank, with the unit in each name.
        weight_hashes: step -> hash of the logical weights (the same on every rank).
        loss: the loss of each measured step, if the workload trains.
        grad_norm: the norm of each measured step's gradients before clipping, if the workload trains.
        environment: versions and devices that numbers depend on.
        wait_ms: time in collectives in each step, from this rank's arrival at a collective to the collective's end; of
            all steps, or of as many of the last steps as are known.
        memory_bytes: memory in use before every tenth step.
        canary_before: milliseconds that the parts of a fixed program took before the steps.
        canary_after: the same after the steps.
        tensor_hashes: hashes of the logical ``weights``, ``gradients`` and ``optimizer`` state, tensor by tensor; the
            same on every rank.
        boundary_hashes: hashes of the inputs and outputs of this rank's modules, ``forward`` and ``backward``.
        overlap: one entry per profiled step; empty if no step was profiled.
        head_start: lead of the host in the profiled steps; None on CPU ranks and if no step was profiled.
        overlap_as_run: one entry per step that was profiled on a device without a head start.
        kernels: time and calls per profiled step of each kernel family, or on CPU ranks of each operator without the
            operators that it calls; at most 64 entries: if there are more, the last one sums the shortest.
        collectives: the calls of collectives in the profiled steps.
        overlap_problem: the reason why steps were profiled without a result; empty if ``overlap`` has entries or no
            step was profiled.
        timeline: lanes of the last profiled step, ``compute``, ``copy`` and the collectives' names, as
            ``[begin_ms, end_ms]`` from the beginning of the step; if a lane has too many intervals to draw, the
            shortest gaps are closed.
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
    head_start: HeadStart | None = None
    overlap_as_run: list[StepOverlap] = field(default_factory=list)
    kernels: dict[str, FamilyTime] = field(default_factory=dict)
    collectives: list[CollectiveCalls] = field(default_factory=list)
    overlap_problem: str = ""


@dataclass(frozen=True)
class LaunchRecord:
    """The launch that a result came from, with everything needed to repeat the launch.

    Attributes:
        request: the workload or script with its config, as requested for the version under test.
        reference: the A/B reference whose version of the request ran; None for the version under test.
        run_dir: the launch's run folder.
    """

    request: LaunchRequest
    reference: AnyReference | None
    run_dir: Path


@dataclass(frozen=True)
class WorkloadResult:
    """The result of one launch over all ranks.

    Lists by rank contain one entry per rank, or the entry of rank 0 alone if an adapter reads a log that only rank 0
    writes. Attributes without a description are those of :class:`RankResult`, over all ranks.

    Attributes:
        workload: name of the workload or script.
        config: value of every config key; for a script, its arguments and environment variables.
        world_size: number of ranks.
        device: ``cuda`` or ``cpu``.
        backend: backend of the process group.
        platform: the platform's name, which is part of the key of baselines.
        launcher: the program that started the ranks, torchrun or forkserver.
        failure_details: the first failures of all ranks, at most 100, by iteration, layer and rank.
        first_failure_iteration: iteration of the first of ``failure_details``; None without failures.
        launch_times_s: duration of the launch as ``wall``, and of the phases that are known, in seconds.
        rank_step_times_ms: ``rank_step_times_ms[rank][step]``.
        rank_metrics: ``rank_metrics[name][rank]``.
        wait_ms, memory_bytes: one list per rank.
        canary_before: ``canary_before[name][rank]``, milliseconds that the parts of a fixed program took before the
            steps; empty if the workload has no process group at that time.
        canary_after: the same after the steps.
        head_start: one entry per rank that has one.
        boundary_hashes, overlap, overlap_as_run, timeline, kernels, collectives: ``boundary_hashes[rank]``,
            ``overlap[rank][profiled step]``, ``overlap_as_run[rank][profiled step]``, ``timeline[rank]``,
            ``kernels[rank][family]`` and ``collectives[rank][number]``; empty if every rank's entry is empty.
        profiler: the profiler that the ranks ran under; None if there was none.
        elapsed_sec: the largest of the ranks' wall times of the measured loop, in seconds.
        platform_facts: readings of the devices' sensors; None on CPU ranks.
        provenance: time, host and code version of the launch; None for a result that was stored before results had a
            provenance.
        launch: the launch that the result came from; None for a result that was read from a file or built by hand,
            which includes copies made by ``dataclasses.replace``. Not part of the document.
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
    rank_step_times_ms: list[list[float]]
    rank_metrics: dict[str, list[float]]
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
    head_start: list[HeadStart] = field(default_factory=list)
    overlap_as_run: list[list[StepOverlap]] = field(default_factory=list)
    kernels: list[dict[str, FamilyTime]] = field(default_factory=list)
    collectives: list[list[CollectiveCalls]] = field(default_factory=list)
    overlap_problem: str = ""
    provenance: Provenance | None = None
    launch: LaunchRecord | None = field(init=False, default=None, repr=False, compare=False)

    @property
    def step_times_ms(self) -> list[float]:
        """Return the time of each step in milliseconds, its maximum over ranks."""
        return _slowest_rank_ms(self.rank_step_times_ms)

    @property
    def metrics(self) -> dict[str, float]:
        """Return each metric of the ranks over all ranks, and metrics that have AORTA's names.

        The value over ranks is the largest if the name starts with ``peak_``, else the mean. ``step_time_p50`` and,
        from 100 steps on, ``step_time_p99`` are quantiles of :attr:`step_times_ms`. ``gemm_throughput`` is another name
        of ``gemm_throughput_tflops``, for workloads that have this metric.
        """
        return _metrics(self.step_times_ms, self.rank_metrics)

    @property
    def executed_iterations(self) -> int:
        """Return ``total_iterations``, under the name that AORTA gives it."""
        return self.total_iterations

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkloadResult:
        """Build the result from a document that was validated against the schema; properties are computed again."""
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        values["failure_details"] = [FailureDetail(**detail) for detail in data["failure_details"]]
        values["tensor_hashes"] = _hashes_from_json(data.get("tensor_hashes", {}))
        values["boundary_hashes"] = [_hashes_from_json(rank) for rank in data.get("boundary_hashes", [])]
        if values.get("platform_facts") is not None:
            values["platform_facts"] = PlatformFacts.from_json(values["platform_facts"])
        for name in ("overlap", "overlap_as_run"):
            values[name] = [[StepOverlap.from_json(step) for step in rank] for rank in data.get(name, [])]
        values["head_start"] = [HeadStart(**entry) for entry in data.get("head_start", [])]
        values["kernels"] = [
            {family: FamilyTime(**time) for family, time in rank.items()} for rank in data.get("kernels", [])
        ]
        values["collectives"] = [[CollectiveCalls(**calls) for calls in rank] for rank in data.get("collectives", [])]
        if values.get("provenance") is not None:
            values["provenance"] = Provenance(**values["provenance"])
        return cls(**values)

    def launched_by(self, launch: LaunchRecord) -> WorkloadResult:
        """Return a copy that carries its launch."""
        copy = replace(self)
        # The class is frozen. The field is not an argument of the constructor, so that an edited copy has no launch.
        object.__setattr__(copy, "launch", launch)
        return copy

    def to_json(self) -> dict[str, Any]:
        """Return the document that the schema describes, with lists in place of tuples."""
        values = {item.name: to_builtins(getattr(self, item.name)) for item in fields(self) if item.name != "launch"}
        document: dict[str, Any] = json.loads(json.dumps(values | derived(values)))
        return document


def _hashes_from_json(data: Mapping[str, Any]) -> dict[str, TensorHashes]:
    return {kind: TensorHashes(**hashes) for kind, hashes in data.items()}


def derived(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a result's document that follow from its other keys."""
    steps_ms = _slowest_rank_ms(document["rank_step_times_ms"])
    return {
        "executed_iterations": document["total_iterations"],
        "step_times_ms": steps_ms,
        "metrics": _metrics(steps_ms, document["rank_metrics"]),
    }


def _slowest_rank_ms(rank_step_times_ms: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*rank_step_times_ms, strict=True)]


def over_ranks(name: str, values: Sequence[float]) -> float:
    """Return a metric over ranks: the largest value if the name starts with ``peak_``, else the mean."""
    return float(max(values) if name.startswith(_PEAK) else mean(values))


def _metrics(step_times_ms: Sequence[float], rank_metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found = {name: over_ranks(name, values) for name, values in rank_metrics.items()}
    if "gemm_throughput_tflops" in found:
        found["gemm_throughput"] = found["gemm_throughput_tflops"]
    found["step_time_p50"] = float(median(step_times_ms))
    if len(step_times_ms) >= MIN_STEPS_P99:
        found["step_time_p99"] = quantiles(map(float, step_times_ms), n=100, method="inclusive")[98]
    return found
