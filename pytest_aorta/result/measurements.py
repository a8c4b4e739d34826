"""Measurements of a launch: a :class:`RankResult` per rank in one :class:`WorkloadResult`.

Results contain raw facts only; ``facts.py`` condenses them into statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import median, quantiles
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from msgspec import Meta, field

from pytest_aorta.common.model import (
    Count,
    Fact,
    Finite,
    Milliseconds,
    Model,
    Name,
    NotNegative,
    Platform,
    Positive,
    Step,
    TensorHash,
    Text,
    WeightHash,
)
from pytest_aorta.plan.device_kind import Backend, DeviceKind
from pytest_aorta.result.facts import PYTHON_TRACER, LaunchFacts, launch_facts, over_ranks
from pytest_aorta.result.outcome import LauncherName
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.result.sensors import PlatformFacts
from pytest_aorta.result.series import Series, joined_hashes
from pytest_aorta.result.trace.profiled_steps import Costs, Profile

SCHEMA_VERSION: Final = 5
MAX_FAILURE_DETAILS = 100
# With fewer steps the 99th percentile is the largest or second-largest value.
MIN_STEPS_P99 = 100
# The fact about a simulated rank whose parameters are padded: the names of those with fewer rows than ranks.
PADDED = "padded_parameters"
T = TypeVar("T")


class FailureDetail(Model, frozen=True):
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

    kind: Text
    iteration: Count
    rank: Count
    layer: Count | None = None
    source_rank: Count | None = None
    index: Count | None = None
    count: Positive = 1
    total: Positive | None = None
    expected: float | None = None
    actual: float | None = None
    cause: str | None = None

    def __str__(self) -> str:
        """Return one line with the location, the number of wrong elements, the expected and the actual value."""
        layer = "" if self.layer is None else f", layer {self.layer}"
        source = "" if self.source_rank is None else f", from source rank {self.source_rank}"
        of_all = "" if self.total is None else f" of {self.total}"
        text = f"{self.kind}: iteration {self.iteration}{layer}, on rank {self.rank}{source}: {self.count}{of_all}"
        text += " elements wrong"
        if self.index is not None:
            text += f", first at index {self.index}"
            if self.expected is not None and self.actual is not None:
                text += f": expected {self.expected:g}, got {self.actual:g}"
        return text + (f" ({self.cause})" if self.cause else "")


class TensorHashes(Model, frozen=True):
    """Hashes of named tensors in chosen steps, each of 128 bits and written in hex.

    Attributes:
        names: parameters in the order of their registration.
        shapes: the shape of each named tensor.
        steps: measured step -> one hash per name.
    """

    names: list[str]
    shapes: list[list[Count]]
    steps: dict[Step, list[TensorHash]]


class RankResult(Model, frozen=True, kw_only=True, omit_defaults=True):
    """The measurements of one rank.

    Attributes:
        passed: whether the workload's own checks held on this rank.
        failure_count: number of failed checks; ``failures`` details the first few.
        configured_iterations: measured steps that were requested.
        total_iterations: measured steps that were done.
        step_times_ms: this rank's duration of each measured step, in order.
        elapsed_sec: wall time of the measured loop, in seconds.
        main_work_started: whether the measured loop was entered.
        failures: details of the first failed checks.
        metrics: raw facts of this rank, with the unit in each name.
        weight_hashes: step -> hash of the logical weights (the same on every rank).
        loss: the loss of each measured step, if the workload trains.
        grad_norm: the norm of each measured step's gradients before clipping, if the workload trains.
        environment: versions and devices that numbers depend on.
        collective_ms: time in collectives in each step, from this rank's arrival at a collective to its end; of all
            steps, or of as many of the last steps as are known.
        memory_bytes: memory in use before evenly spaced steps, fewer than 14 of them: what the device's allocator, or
            malloc on CPU ranks, has given out.
        resident_bytes: memory of the process that is resident on the host, before the same steps.
        cpu_wait: for which part of the steps' time threads of this rank waited for a CPU, summed over threads; None on
            accelerators, and where it is not known.
        gc_ms: time of a step in which Python collected garbage, a mean over steps.
        outside: measurements outside of the steps' times, with the unit in each name, of which a rank may have others
            than its peers.
        tensor_hashes: hashes of the logical ``weights``, ``gradients`` and ``optimizer`` state, tensor by tensor; the
            same on every rank.
        profile: the profiled steps; empty if no step was profiled.
        costs: the costs of a step; None if none was counted.
        series: what was recorded of each optimizer of an unedited script, in the order of their first steps.
    """

    passed: bool
    failure_count: Count
    configured_iterations: Positive
    total_iterations: Count
    step_times_ms: Annotated[list[Milliseconds], Meta(min_length=1)]
    elapsed_sec: NotNegative
    main_work_started: bool = True
    failures: list[FailureDetail] = []
    metrics: dict[Name, Finite] = {}
    weight_hashes: dict[Step, WeightHash] = {}
    loss: list[Finite] = []
    grad_norm: list[NotNegative] = []
    environment: dict[str, Fact] = {}
    collective_ms: list[Milliseconds] = []
    memory_bytes: list[Count] = []
    resident_bytes: list[Count] = []
    cpu_wait: NotNegative | None = None
    gc_ms: Milliseconds = 0.0
    outside: dict[Name, NotNegative] = {}
    tensor_hashes: dict[str, TensorHashes] = {}
    profile: Profile = field(default_factory=Profile)
    costs: Costs | None = None
    series: list[Series] = []

    @classmethod
    def of_steps(cls, step_times_ms: Sequence[float], elapsed_sec: float) -> RankResult:
        """Return a result with these times alone, of steps that no check has failed."""
        return cls(
            passed=True,
            failure_count=0,
            configured_iterations=len(step_times_ms),
            total_iterations=len(step_times_ms),
            step_times_ms=[*step_times_ms],
            elapsed_sec=elapsed_sec,
        )

    def with_profile(self, profile: Profile) -> RankResult:
        """Return the result with profiled steps and their metrics."""
        return self.replace(profile=profile, metrics=self.metrics | profile.metrics())

    def problem(self) -> str | None:
        """Return which of this rank's values contradict each other, or None."""
        steps = self.total_iterations
        if self.passed != (self.failure_count == 0):
            return f"passed is {self.passed} with failure_count {self.failure_count}"
        if not steps == self.configured_iterations == len(self.step_times_ms):
            return (
                f"{self.configured_iterations} iterations configured, {steps} done, {len(self.step_times_ms)} step "
                f"times; they have to be equal"
            )
        if len(self.collective_ms) > steps:
            return f"collective_ms has {len(self.collective_ms)} entries for {steps} steps; allowed is one per step"
        for name, values in {"loss": self.loss, "grad_norm": self.grad_norm}.items():
            if len(values) not in (0, steps):
                return (
                    f"{name} has {len(values)} values for {steps} measured steps; record it after every step, as "
                    f"recorder.{name}(value) does, or never"
                )
        return None


class _OfRanks(Generic[T]):
    """A value that a result computes from its ranks whenever it is read."""

    def __init__(self, value_of: Callable[[list[RankResult]], T]) -> None:
        self.value_of = value_of

    def __get__(self, result: WorkloadResult, _owner: type[WorkloadResult]) -> T:
        """Return the value of one result."""
        return self.value_of(result.ranks)


class WorkloadResult(Model, frozen=True, kw_only=True, dict=True):
    """The result of one launch over all ranks.

    Lists by rank contain one entry per rank, or one entry alone if only one rank steps an optimizer. The attributes
    from ``passed`` on are computed from ``ranks``, which the result's file contains alone.

    Attributes:
        schema_version: version of this schema.
        workload: name of the workload or script.
        config: value of every config key; for a script, its arguments and environment variables.
        world_size: number of ranks.
        simulated: the ranks that were started if the world was simulated, in the order of ``ranks``; else empty.
        device: ``cuda`` or ``cpu``.
        backend: backend of the process group.
        platform: the platform's name, which is part of the key of baselines.
        launcher: what started the ranks: torchrun, forkserver or the name of a plugin's launcher.
        profiler: the profiler that the ranks ran under; None if there was none.
        launch_times_s: duration of the launch as ``wall``, in seconds.
        host: name of the host that pytest ran on.
        provenance: time, session block and code version of the launch.
        platform_facts: readings of the devices' sensors; None on CPU ranks.
        system: facts of the host and of what is installed there that can move times.
        collective_ms: time in collectives in each of the last steps, ``collective_ms[rank][step]``: measured by the
            ranks, or on CPU ranks computed from their arrivals at collectives.
        ranks: the measurements of each rank.
        passed: whether the workload's own checks held on all ranks.
        failure_count: number of failed checks of all ranks.
        failure_details: the first failures of all ranks, at most 100, by iteration, layer and rank.
        first_failure_iteration: the iteration of the first of ``failure_details``; None without failures.
        configured_iterations: measured steps that were requested.
        total_iterations: measured steps that were done.
        executed_iterations: ``total_iterations``, under the name that AORTA gives it.
        main_work_started: whether every rank entered the measured loop.
        elapsed_sec: the largest of the ranks' wall times of the measured loop, in seconds.
        weight_hashes: step -> hash of the logical weights, on which all ranks agree; for an unedited script, of the
            parts that the ranks hold, joined.
        loss: the loss of each measured step, on which all ranks agree; empty if nothing was trained.
        grad_norm: the norm of each measured step's gradients before clipping, on which all ranks agree.
        tensor_hashes: the hashes of logical tensors, on which all ranks agree.
        rank_step_times_ms: ``rank_step_times_ms[rank][step]``.
        rank_metrics: ``rank_metrics[name][rank]``; the unit is part of the name.
        memory_bytes: ``memory_bytes[rank]``: memory in use before evenly spaced steps, fewer than 14 of them.
        overlap: ``overlap[rank][profiled step]``; empty if no step was profiled.
        overlap_as_run: ``overlap_as_run[rank][profiled step]``, without a head start; empty on CPU ranks.
        head_start: the lead of each host that has one.
        timeline: ``timeline[rank]`` of the last profiled step; empty if no step was profiled.
        kernels: ``kernels[rank][family]``; empty if no step was profiled.
        collectives: ``collectives[rank]``: the calls in the profiled steps; empty if there were none.
        overlap_problem: the reason why steps were profiled without a result; empty if there is none.
        costs: ``costs[rank]`` of a step; None for a rank that counted none.
    """

    schema_version: Literal[5]
    workload: Text
    config: dict[str, Any]
    world_size: Positive
    simulated: list[Count] = []
    device: DeviceKind
    backend: Backend
    platform: Platform
    launcher: LauncherName
    profiler: Text | None = None
    launch_times_s: dict[str, NotNegative]
    host: str
    provenance: Provenance
    platform_facts: PlatformFacts | None = None
    system: dict[Name, Fact] = {}
    collective_ms: list[list[Milliseconds]] = []
    ranks: Annotated[list[RankResult], Meta(min_length=1)]

    passed = _OfRanks(lambda ranks: all(rank.passed for rank in ranks))
    failure_count = _OfRanks(lambda ranks: sum(rank.failure_count for rank in ranks))
    failure_details = _OfRanks(lambda ranks: _first_failures(ranks))
    first_failure_iteration = _OfRanks(
        lambda ranks: next((detail.iteration for detail in _first_failures(ranks)), None)
    )
    configured_iterations = _OfRanks(lambda ranks: ranks[0].configured_iterations)
    total_iterations = _OfRanks(lambda ranks: ranks[0].total_iterations)
    executed_iterations = total_iterations
    main_work_started = _OfRanks(lambda ranks: all(rank.main_work_started for rank in ranks))
    elapsed_sec = _OfRanks(lambda ranks: max(rank.elapsed_sec for rank in ranks))
    weight_hashes = _OfRanks(lambda ranks: ranks[0].weight_hashes or joined_hashes([rank.series for rank in ranks]))
    loss = _OfRanks(lambda ranks: ranks[0].loss)
    grad_norm = _OfRanks(lambda ranks: ranks[0].grad_norm)
    tensor_hashes = _OfRanks(lambda ranks: ranks[0].tensor_hashes)
    rank_step_times_ms = _OfRanks(lambda ranks: [rank.step_times_ms for rank in ranks])
    rank_metrics = _OfRanks(lambda ranks: {name: [rank.metrics[name] for rank in ranks] for name in ranks[0].metrics})
    memory_bytes = _OfRanks(lambda ranks: [rank.memory_bytes for rank in ranks])
    overlap = _OfRanks(lambda ranks: _unless_all_empty([rank.profile.steps for rank in ranks]))
    overlap_as_run = _OfRanks(lambda ranks: _unless_all_empty([rank.profile.as_run for rank in ranks]))
    head_start = _OfRanks(lambda ranks: [rank.profile.head_start for rank in ranks if rank.profile.head_start])
    timeline = _OfRanks(lambda ranks: _unless_all_empty([rank.profile.timeline for rank in ranks]))
    kernels = _OfRanks(lambda ranks: _unless_all_empty([rank.profile.kernels for rank in ranks]))
    collectives = _OfRanks(lambda ranks: _unless_all_empty([rank.profile.collectives for rank in ranks]))
    overlap_problem = _OfRanks(lambda ranks: ranks[0].profile.problem)
    costs = _OfRanks(lambda ranks: [rank.costs for rank in ranks])

    @cached_property
    def step_times_ms(self) -> list[float]:
        """Return the time of each step in milliseconds, its maximum over ranks."""
        return list(map(max, zip(*self.rank_step_times_ms, strict=True)))

    @cached_property
    def facts(self) -> LaunchFacts:
        """Return the facts that comparisons use, condensed once."""
        return launch_facts(self)

    @property
    def metrics(self) -> dict[str, float]:
        """Return each metric of the ranks over all ranks, and metrics that have AORTA's names.

        The value over ranks is the largest if the name starts with ``peak_``, else the mean. ``step_time_p50`` and,
        from 100 steps on, ``step_time_p99`` are quantiles of :attr:`step_times_ms`. ``gemm_throughput`` is another name
        of ``gemm_throughput_tflops``, for workloads that have this metric.
        """
        found = {name: over_ranks(name, values) for name, values in self.rank_metrics.items()}
        if "gemm_throughput_tflops" in found:
            found["gemm_throughput"] = found["gemm_throughput_tflops"]
        found["step_time_p50"] = float(median(self.step_times_ms))
        if len(self.step_times_ms) >= MIN_STEPS_P99:
            found["step_time_p99"] = quantiles(map(float, self.step_times_ms), n=100, method="inclusive")[98]
        return found

    @property
    def environment(self) -> dict[str, Fact]:
        """Return the versions and devices of rank 0, and the Python tracer of the first rank that ran under one."""
        found = dict(self.ranks[0].environment)
        for rank in self.ranks:
            if PYTHON_TRACER not in found and rank.environment.get(PYTHON_TRACER):
                found[PYTHON_TRACER] = rank.environment[PYTHON_TRACER]
        return found


def _unless_all_empty(values: list[T]) -> list[T]:
    return values if any(values) else []


def _first_failures(ranks: Sequence[RankResult]) -> list[FailureDetail]:
    found = [detail for rank in ranks for detail in rank.failures]
    found.sort(key=lambda detail: (detail.iteration, -1 if detail.layer is None else detail.layer, detail.rank))
    return found[:MAX_FAILURE_DETAILS]
