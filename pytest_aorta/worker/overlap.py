"""Captures of a few steps with torch's profiler, after the timed steps, to measure overlap.

Recording host events delays kernel launches and exposes communication that unprofiled steps hide, so only device
activity is recorded. Facts that only host events contain are learned from one further step.

A late host exposes communication too. So a spin kernel on the training stream holds the device back until the host has
enqueued the profiled steps: with this head start, the steps show the overlap that their dependencies allow.
"""

from __future__ import annotations

import functools
import gzip
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from pytest_aorta.common.clock import time
from pytest_aorta.common.files import write_bytes
from pytest_aorta.plan.options import TORCH
from pytest_aorta.result.folder import TRACE_FILE
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.kept import HEAD_START_KEY
from pytest_aorta.result.trace.kineto import (
    BOUNDARY,
    FEWER,
    LearnedStep,
    TraceTooLarge,
    excess,
    find_blocking_call,
    learn_step,
    overlap_of_cpu,
    overlap_of_device,
    steps_alone,
)
from pytest_aorta.result.trace.overlap import PartAhead, is_too_late, joined_ahead
from pytest_aorta.result.trace.profiled_steps import (
    ANOTHER_RANK,
    CollectiveCalls,
    Costs,
    HeadStart,
    Profile,
    StepOverlap,
    waits_ms,
)
from pytest_aorta.worker.accelerator import cycles_per_ms, group_device, on_accelerator, spin, synchronize
from pytest_aorta.worker.collectives import recorded_calls
from pytest_aorta.worker.costs import costs_of, with_compilations
from pytest_aorta.worker.lines import Lines
from pytest_aorta.worker.own_plan import own_folder, own_plan
from pytest_aorta.worker.profiling import Exported, ScriptProfiler, end_profiler, profiler_of
from pytest_aorta.worker.simulation import is_simulated
from pytest_aorta.worker.streams import marked_streams
from pytest_aorta.worker.torch_private import profiler_enabled

# Steps of a trace that the launch asks for if the config asks for none.
TRACED_STEPS = 3


def capture_overlap(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    *,
    trace_path: Path | None = None,
    timed_ms: float | None = None,
) -> Profile:
    """Run ``step`` under the profiler and return the overlap of ``num_steps`` steps on this rank; collective.

    ``step`` runs once before the captured steps, since the first profiled step pays for the profiler's start. Ranks
    enter together. At the end of ``step`` the current stream has to wait for everything that ``step`` enqueued.

    On a device the steps are captured at least twice: first as they run, after one further step, then with a head start
    of the host, two at a time, each time after one further step. While such steps of any rank were delayed, their
    capture is repeated with a longer head start. Steps that were delayed in all
    attempts do not count. If these are more than half of the steps, or a step waits for the device, the head start has
    failed, and the steps as they run are the capture.

    A gzipped Chrome trace of ``num_steps`` steps, with the host's operators, is kept at ``trace_path``, or in the
    rank's folder if the launch asks for traces. On a device the trace shows ``num_steps`` further steps, which run last
    and without a head start, since recording operators makes steps slower.

    Args:
        step: Runs one training step.
        num_steps: Number of steps to capture.
        device: The device that the steps run on.
        trace_path: File for a trace; None: no trace unless the launch asks for traces.
        timed_ms: Median duration of the timed steps in milliseconds, which shows whether the head start sufficed; None:
            unknown.

    If a trace of any rank is too large to be read, the capture of every rank has no steps, but a ``problem`` that names
    the size, the limit and the remedy, and a warning contains the problem. A trace that is only to be kept is then left
    out with a warning.

    Raises:
        RuntimeError: The step or its caller runs ``torch.profiler``.
        ValueError: ``num_steps`` is below 1, or the trace contains no steps or no device.
    """
    return _captured(step, num_steps, device, trace_path, timed_ms)[0]


def _captured(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    trace_path: Path | None = None,
    timed_ms: float | None = None,
) -> tuple[Profile, Costs]:
    """Return the overlap of some steps, and the costs of one step before them."""
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}, allowed is an integer from 1")
    kept = trace_path or _asked_trace_path()
    try:
        first, costs = _counted(step, device)
        if on_accelerator(device):
            capture = _capture_ahead(step, num_steps, device, first, timed_ms)
        else:
            trace = _trace_of(_profile(step, num_steps, device)[0], num_steps, device)
            capture = overlap_of_cpu(trace)
        if kept is not None and on_accelerator(device):
            _keep_profiled(_profile(step, num_steps, device)[0], num_steps, device, kept)
        elif kept is not None:
            _keep(steps_alone(trace, on_device=False), kept)
    except _TooLargeError as error:
        remedy = "lower profile_steps, or set it to 0" if error.num_steps > 1 else "set profile_steps: 0"
        problem = f"{error}; {remedy} to measure without overlap, or use fewer micro-batches per step"
        warnings.warn(f"overlap is not measured: {problem}", stacklevel=3)
        capture, costs = Profile(problem=problem), Costs(problem=problem)
    return capture, costs


class _OwnProfilerError(RuntimeError):
    """A step, or its caller, that runs torch's profiler itself."""


class _TooLargeError(Exception):
    """A trace of at least one rank is too large to be read; all ranks raise the error, with the same message."""

    def __init__(self, num_steps: int, beyond: str) -> None:
        steps = f"{num_steps} profiled steps" if num_steps > 1 else "one profiled step"
        super().__init__(f"the trace of {steps} has {beyond}")
        self.num_steps = num_steps


def _counted(step: Callable[[], object], device: torch.device) -> tuple[dict[str, Any], Costs]:
    """Profile one step with shapes; return its trace and its costs; collective.

    Raises:
        _TooLargeError: The trace of any rank is too large.
    """
    compiled = with_compilations(Costs())
    lines = Lines()

    def noted() -> None:
        with marked_streams(device), lines:
            step()

    profiler, passed = _profile(noted, 1, device, shapes=True)
    trace = _trace_of(profiler, 1, device)
    found = costs_of(trace, device, recorded_calls(passed.began_ns, passed.ended_ns, device), lines)
    return trace, found.replace(
        compiled_graphs=compiled.compiled_graphs,
        recompilations=compiled.recompilations,
        graph_breaks=compiled.graph_breaks,
        places=found.places | compiled.places,
    )


def _count_step(step: Callable[[], object], device: torch.device) -> Costs:
    """Run ``step`` once and return its costs on this rank, or why they can't be counted; collective."""
    try:
        return _counted(step, device)[1]
    except (_TooLargeError, _OwnProfilerError) as error:
        return Costs(problem=str(error))


def _capture_ahead(
    step: Callable[[], object], num_steps: int, device: torch.device, first: dict[str, Any], timed_ms: float | None
) -> Profile:
    """Capture steps as they run, then with the host ahead, a few at a time, as long as enough of them can count."""
    learned, blocking_call = learn_step(first), find_blocking_call(first)

    def attempt(size: int, lead_ms: float) -> tuple[Profile, _Pass]:
        profiler, passed = _profile(step, size, device, host=False, lead_ms=lead_ms, warmup=1)
        return _without_waits(_trace_of(profiler, size, device), learned, size, device), passed

    as_run, passed = attempt(num_steps, 0.0)
    # Each capture runs one further step.
    each_ms = _largest_over_ranks([passed.host_ms], device)[0] / (num_steps + 1)
    parts: list[PartAhead] = []
    for begin in range(0, num_steps, MAX_STEPS):
        size = min(MAX_STEPS, num_steps - begin)
        parts.append(
            _part_ahead(functools.partial(attempt, size), (size + 1) * each_ms, device, timed_ms, blocking_call)
        )
        if is_too_late(parts, num_steps):
            break
    return joined_ahead(parts, as_run, num_steps)


def _part_ahead(
    attempt: Callable[[float], tuple[Profile, _Pass]],
    host_ms: float,
    device: torch.device,
    timed_ms: float | None,
    blocking_call: str | None,
) -> PartAhead:
    """Capture one part of the steps with the host ahead; retry until it was ahead on all ranks, or blocked twice."""
    num_blocked = 0
    for attempts, lead_ms in enumerate(_leads_ms(host_ms), 1):
        capture, passed = attempt(lead_ms)
        own = _judge(capture.steps, passed, lead_ms, timed_ms, blocking_call).replace(attempts=attempts)
        has_failed, is_blocked = map(bool, _largest_over_ranks([not own.succeeded, own.blocked_by is not None], device))
        num_blocked += is_blocked
        if not has_failed or num_blocked == BLOCKED_ATTEMPTS:
            break
    blocked_by = (own.blocked_by or ANOTHER_RANK) if num_blocked == BLOCKED_ATTEMPTS else None
    return PartAhead(capture, own.replace(succeeded=not has_failed, blocked_by=blocked_by))


def _without_waits(trace: dict[str, Any], learned: LearnedStep, num_steps: int, device: torch.device) -> Profile:
    """Return the capture of this rank's steps without its waits for late ranks; collective."""
    capture = overlap_of_device(trace, learned, num_steps)
    if not dist.is_initialized():
        return capture
    waits = waits_ms(_calls_of_all_ranks(capture.collectives, device), dist.get_rank())
    return overlap_of_device(trace, learned, num_steps, waits)


@dataclass
class _Window:
    """Steps of a script that are profiled together, after one further step."""

    num_steps: int
    has_host: bool
    has_lead: bool = False
    trace: Exported | None = None
    began_s: float = 0.0
    lead_ms: float = 0.0
    # When the host had enqueued the further step, and the last one.
    first_ms: float = 0.0
    host_ms: float = 0.0
    # Steps of the window that have ended.
    num_ended: int = 0


# Profiled steps of a script: the first ones as they run, and on a device with the host ahead.
SCRIPT_STEPS = 3


class ScriptCapture(ScriptProfiler):
    """Capture of some steps of a script, whose loop belongs to the script; nothing is collective.

    The script calls no function of ours in its steps: :meth:`boundary` is called at the end of each. On a device, one
    step is learned with the host's operators, then steps are profiled as they run, then with a head start: each is a
    window, with a profiler of its own. The caller leaves a step between windows.
    """

    where, what = "itself", "profile of its steps"

    def __init__(self, device: torch.device, prepared: Collection[int] = ()) -> None:
        super().__init__(device, prepared)
        if on_accelerator(device):
            self._windows = [_Window(1, True), _Window(SCRIPT_STEPS, False), _Window(MAX_STEPS, False, has_lead=True)]
        else:
            self._windows = [_Window(SCRIPT_STEPS, True)]
        self._number = 0

    @property
    def is_open(self) -> bool:
        """Return whether further steps have to be profiled."""
        return not self.problem and self._number < len(self._windows)

    @property
    def num_steps_left(self) -> int:
        """The largest number of steps that the capture needs until its end, with one before each further window."""
        left = self._windows[self._number :]
        return sum(1 + window.num_steps - window.num_ended for window in left) + len(left) - (not self._number)

    def begin(self) -> None:
        """Begin the next window in front of a step."""
        if not self.is_free():
            return
        window = self._windows[self._number]
        self._mark = _new_mark(self.device)
        if on_accelerator(self.device):
            cycles_per_ms(self.device)
        synchronize(self.device)
        self.start(host=window.has_host)
        window.began_s = time.perf_counter()
        if window.has_lead:
            # The steps before took this time on the host, with one further step each.
            before = self._windows[self._number - 1]
            each_ms = before.host_ms / (1 + before.num_steps)
            window.lead_ms = next(_leads_ms((1 + window.num_steps) * each_ms))
            spin(window.lead_ms, self.device)

    def boundary(self) -> None:
        """Mark the end of a step, and end the window where its steps are complete."""
        window = self._windows[self._number]
        _leave_boundary(self._mark)
        window.num_ended += 1
        window.host_ms = 1e3 * (time.perf_counter() - window.began_s)
        if window.num_ended == 1:
            window.first_ms = window.host_ms
        if window.num_ended > window.num_steps:
            self.end()
            self._number += 1

    def end(self) -> None:
        """End the profiler, if one runs; also where the script has ended within the capture."""
        if self.is_running:
            synchronize(self.device)
            self._windows[self._number].trace = self.stop()

    def read(self, timed_ms: float) -> Profile:
        """Return the overlap of the steps, of this rank alone; a capture that can't be read has a ``problem``."""
        if self.problem:
            return Profile(problem=self.problem)
        try:
            traces = [window.trace.read() for window in self._windows if window.trace is not None]
            on_device = on_accelerator(self.device)
            # The first window has the host's operators.
            if (kept := _asked_trace_path()) is not None:
                _keep(steps_alone(traces[0], on_device=on_device), kept)
            return self._of_device(traces, timed_ms) if on_device else overlap_of_cpu(traces[0])
        except TraceTooLarge as error:
            return Profile(problem=f"the trace of the profiled steps has {excess(error.num_bytes, error.num_values)}")
        except ValueError as error:
            return Profile(problem=str(error)[:1000])

    def _of_device(self, traces: Sequence[dict[str, Any]], timed_ms: float) -> Profile:
        learned, blocking_call = learn_step(traces[0]), find_blocking_call(traces[0])
        as_run, ahead = (
            overlap_of_device(trace, learned, window.num_steps)
            for trace, window in zip(traces[1:], self._windows[1:], strict=True)
        )
        window = self._windows[-1]
        passed = _Pass(window.first_ms, window.host_ms)
        lead = _judge(ahead.steps, passed, window.lead_ms, timed_ms, blocking_call)
        # Each rank judges alone, so a head start that failed keeps its steps: all ranks have as many.
        return ahead.replace(head_start=lead, as_run=as_run.steps)


def _asked_trace_path() -> Path | None:
    folder, plan = own_folder(), own_plan()
    return folder / TRACE_FILE if folder and plan and plan.profiler == TORCH else None


def profiled(result: RankResult, step: Callable[[], object], num_steps: int, device: torch.device) -> RankResult:
    """Return ``result`` with the costs of a further step, and the overlap of ``num_steps`` more of them.

    Collective. Call this last, since ``step`` continues the training. ``num_steps`` 0 measures no overlap; a launch
    that asks for traces then still gets traces of some steps.

    Args:
        result: Result of this rank, whose step times are those of the timed steps.
        step: Runs one training step.
        num_steps: Number of steps to capture as in :func:`capture_overlap`.
        device: The device that the steps run on.

    Raises:
        RuntimeError, ValueError: As in :func:`capture_overlap`, unless ``num_steps`` is 0.
    """
    if is_simulated():  # nothing is exchanged that could be hidden
        return result.replace(costs=_count_step(step, device))
    if num_steps:
        capture, costs = _captured(step, num_steps, device, timed_ms=median(result.step_times_ms))
        return result.with_profile(capture).replace(costs=costs)
    if _asked_trace_path() is not None:
        return result.replace(costs=_captured(step, TRACED_STEPS, device)[1])
    return result.replace(costs=_count_step(step, device))


def _profile(
    step: Callable[[], object],
    num_steps: int,
    device: torch.device,
    *,
    host: bool = True,
    lead_ms: float = 0.0,
    warmup: int = 0,
    shapes: bool = False,
) -> tuple[profile, _Pass]:
    """Profile steps between boundaries, after ``warmup`` steps, and time the host.

    ``host=False`` records only the device. ``lead_ms`` gives the host a head start. ``shapes`` records the shapes
    of operators' inputs.
    """
    if profiler_enabled():
        raise _OwnProfilerError("torch.profiler runs during the steps, and torch has one profiler per thread")
    on_device = on_accelerator(device)
    mark = _new_mark(device)
    profiler = profiler_of(device, host=host, shapes=shapes)
    if on_device:
        cycles_per_ms(device)
        # The kernel that made the mark may have the name of the boundary's kernel, so it ends before profiling.
        synchronize(device)
    profiler.__enter__()
    try:
        if dist.is_initialized():
            dist.barrier()
        began_s = time.perf_counter()
        if on_device:
            spin(lead_ms, device)
        for _ in range(warmup):
            step()
        first_boundary_s, first_boundary_ns = time.perf_counter(), time.time_ns()
        for _ in range(num_steps):
            _leave_boundary(mark)
            step()
        _leave_boundary(mark)
        ended_s, ended_ns = time.perf_counter(), time.time_ns()
        synchronize(device)
    finally:
        # A profiler that has ended can't be ended: torch 2.11 raises an error, and the export would crash the process.
        if not profiler_enabled():
            raise _OwnProfilerError(
                "the step runs torch.profiler itself, which ends the capture; capture steps without it"
            )
        end_profiler(profiler)
    before_ms, host_ms = (1e3 * (moment_s - began_s) for moment_s in (first_boundary_s, ended_s))
    return profiler, _Pass(before_ms, host_ms, first_boundary_ns, ended_ns)


def _trace_of(profiler: profile, num_steps: int, device: torch.device) -> dict[str, Any]:
    """Return this rank's trace of ``num_steps`` steps; collective, so that all ranks give up together.

    Raises:
        _TooLargeError: The trace of any rank is too large.
    """
    trace, size = {}, (0, 0)
    try:
        trace = Exported(profiler).read()
    except TraceTooLarge as error:
        size = error.num_bytes, error.num_values
    num_bytes, num_values = map(int, _largest_over_ranks(size, device))
    if num_bytes or num_values:
        raise _TooLargeError(num_steps, excess(num_bytes, num_values, " on the largest rank"))
    return trace


def _new_mark(device: torch.device) -> torch.Tensor:
    """Return the tensor that boundaries fill; on a device its rare dtype makes the kernel's name unique."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.zeros(1, dtype=torch.complex32 if on_accelerator(device) else None, device=device)


def _leave_boundary(mark: torch.Tensor) -> None:
    """Mark the boundary between two steps; on a device by a kernel behind all work of the training stream so far."""
    with record_function(BOUNDARY):
        mark.fill_(0)


def _keep_profiled(profiler: profile, num_steps: int, device: torch.device, path: Path) -> None:
    """Keep the trace of a profiler at ``path`` unless it is too large on any rank; collective."""
    try:
        trace = _trace_of(profiler, num_steps, device)
    except _TooLargeError as error:
        warnings.warn(f"{path.name} is not kept: {error}; {FEWER}", stacklevel=2)
    else:
        _keep(steps_alone(trace, on_device=on_accelerator(device)), path)


def _keep(trace: dict[str, Any], path: Path) -> None:
    # A kept trace shows the host and the device as they run side by side, without a head start.
    trace = trace | {HEAD_START_KEY: False}
    if dist.is_initialized():
        # The key of torch.profiler, by which tools identify the ranks of several traces.
        who = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        trace = trace | {"distributedInfo": who}
    # Without spaces, so that the kept trace is not larger than the trace that was read.
    text = json.dumps(trace, separators=(",", ":"))
    write_bytes(path, gzip.compress(text.encode(), compresslevel=4), durable=False)


# Steps of one head start. A device queues a limited number of launches, so the host cannot run ahead of many steps.
MAX_STEPS = 2
MAX_ATTEMPTS = 3
# A step counts as blocked after this many blocked attempts; a late host can also cause a single blocked attempt.
BLOCKED_ATTEMPTS = 2
# Ratio of a lead to the time in which the host enqueued the same steps without a lead.
MARGIN = 1.5
MIN_LEAD_MS = 20.0
MAX_LEAD_MS = 2_000.0
# Profiled steps whose median is at most this many times the median timed step were not delayed.
MAX_STEP_RATIO = 1.03
# Allowed idle time of a step beyond that of the least idle step, as a fraction of the step's time.
MAX_EXTRA_IDLE = 0.03


@dataclass(frozen=True)
class _Pass:
    """Times of one pass over the profiled steps on the host, in milliseconds since the spin kernel was enqueued.

    Attributes:
        first_boundary_ms: Time at which the host had enqueued the step before the first boundary.
        host_ms: Time at which the host had enqueued the last boundary.
        began_ns, ended_ns: The time between the first and the last boundary on the host, by ``time.time_ns``.
    """

    first_boundary_ms: float
    host_ms: float
    began_ns: int = 0
    ended_ns: int = 0


def _leads_ms(host_ms: float) -> Iterator[float]:
    """Yield the leads to try for steps that the host enqueued in ``host_ms`` without a lead."""
    lead_ms = max(MARGIN * host_ms, MIN_LEAD_MS)
    for attempt in range(MAX_ATTEMPTS):
        yield min(lead_ms * 2**attempt, MAX_LEAD_MS)


def _judge(
    steps: Sequence[StepOverlap], passed: _Pass, lead_ms: float, timed_ms: float | None, blocking_call: str | None
) -> HeadStart:
    """Judge whether profiled ``steps`` ran with the host ahead, and return the head start of this attempt.

    Args:
        steps: The profiled steps of this rank.
        passed: Times of the host during these steps.
        lead_ms: The spin kernel's duration.
        timed_ms: Median duration of the timed steps; None: unknown, so that no step counts as slow.
        blocking_call: The runtime call with which a step waits for the device, if the trace shows one. The host then
            can't enqueue the next step while the spin kernel runs.
    """
    is_blocked = blocking_call is not None and passed.first_boundary_ms >= lead_ms
    ratio = median(step.step_ms for step in steps) / timed_ms if timed_ms else None
    least_idle_ms = min(step.idle_ms for step in steps)
    is_idle = any(step.idle_ms > least_idle_ms + MAX_EXTRA_IDLE * step.step_ms for step in steps)
    is_slow = ratio is not None and ratio > MAX_STEP_RATIO
    return HeadStart(
        lead_ms=lead_ms,
        attempts=1,
        step_ratio=ratio,
        succeeded=not (is_blocked or is_idle or is_slow),
        blocked_by=blocking_call if is_blocked else None,
    )


def _largest_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return each value's maximum over ranks."""
    if not dist.is_initialized() or is_simulated():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=group_device(device))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def _calls_of_all_ranks(own: Sequence[CollectiveCalls], device: torch.device) -> list[list[CollectiveCalls]]:
    """Return the collectives' calls of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [list(own)]
    text = msgspec.json.encode(own)
    # Ranks of a pipeline make unequal calls, so the texts differ in length.
    size, device = int(_largest_over_ranks([len(text)], device)[0]), group_device(device)
    # JSON may end with spaces.
    padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(device)
    texts = torch.empty(dist.get_world_size() * size, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(texts, padded)
    received = texts.view(-1, size).cpu()
    return [msgspec.json.decode(bytes(row.numpy()), type=list[CollectiveCalls]) for row in received]
