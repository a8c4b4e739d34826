"""Steps on a rank: their times, their waits in collectives and their costs; the measured loop, the canary and delays.

Collectives make step times equal on all ranks, so step times do not show a straggler. But a straggler arrives last, so
its waits are the shortest. On CUDA the times come from NCCL's flight recorder, which brackets each collective with
events if TORCH_NCCL_ENABLE_TIMING is set. On CPU, where collectives block, a rank waits whenever it does not compute.
The canary is a fixed GEMM and a fixed all-reduce beside the timed steps, to distinguish a slow host from slow code.
Costs are operations by torch's formulas, groups of collectives, and compilations.
"""

import ast
import functools
import mmap
import os
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled

# The classes of torch.profiler import inductor when they start, which takes seconds; these take milliseconds.
from torch.autograd.profiler import profile, record_function

from pytest_aorta.common import variables
from pytest_aorta.common.clock import time
from pytest_aorta.common.files import write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.plan.options import WRAPPERS
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.kineto import BOUNDARY, TraceTooLarge, check_size, excess, overlap_of_cpu, parse_trace
from pytest_aorta.result.trace.kineto_costs import RecordedCall, costs_of_step
from pytest_aorta.result.trace.profiled_steps import Cost, Costs, Profile
from pytest_aorta.result.trace.rank_files import Arrivals, flight_records
from pytest_aorta.worker.accelerator import (
    Moment,
    cycles_per_ms,
    elapsed_ms,
    group_device,
    memory_in_use,
    now,
    on_accelerator,
    spin,
    synchronize,
)
from pytest_aorta.worker.lines import Lines, is_locating, shown
from pytest_aorta.worker.simulation import is_simulated, requested_calls, reset_peak_memory

# Steps between readings of memory at first: a query of CUDA's allocator takes the host tens of microseconds. When there
# are as many readings as are kept, every other one is dropped, and memory is read half as often.
MEMORY_EVERY_STEPS, MEMORY_EVERY_CPU_STEPS, MOST_READINGS = 10, 2, 24


class Progress:
    """The number of entered steps, in eight bytes of a shared file mapping.

    Other processes can read the file, even after the rank has died or while it hangs. Each step costs one store and no
    system call.
    """

    def __init__(self) -> None:
        """Map the file that the launch names; without a launch, map anonymous memory that nobody reads."""
        self._count = 0
        self._bytes = mmap.mmap(-1, 8)
        if path := os.environ.get(variables.PROGRESS_FILE):
            with Path(path).open("wb+") as file:
                file.write(bytes(8))
                file.flush()
                self._bytes = mmap.mmap(file.fileno(), 8)

    def advance(self, steps: int = 1) -> None:
        """Count more entered steps."""
        self.enter(self._count + steps)

    def enter(self, step: int) -> None:
        """Set the number of the entered step, counted from 1."""
        self._count = step
        self._bytes[:8] = step.to_bytes(8, "little")


@dataclass(slots=True)
class _OpenStep:
    """A step that has begun, with the stretches that do not count."""

    memory_bytes: int | None
    began_ns: int
    begin: Moment
    pauses: list[tuple[Moment, Moment]] = field(default_factory=list)


class StepTimer:
    """A timer of steps on one device.

    On an accelerator two events on the current stream bracket each step, so the loop never waits for the device;
    :meth:`step_times_ms` waits for them. Work on other streams counts as far as the current stream waits for it. On
    ``cpu`` the host's monotonic clock times each step.
    """

    def __init__(self, device: torch.device, *, has_progress: bool = True) -> None:
        self.device = device
        self._progress = Progress() if has_progress else None
        self._open: _OpenStep | None = None
        self._moments: list[tuple[Moment, Moment, list[tuple[Moment, Moment]]]] = []
        self._times_ms: list[float] = []
        self._began_ns: list[int] = []
        self._ended_ns: list[int] = []
        self._memory_bytes: list[int] = []
        on_device = on_accelerator(device)
        self._memory_every = MEMORY_EVERY_STEPS if on_device else MEMORY_EVERY_CPU_STEPS
        self._now: Callable[[], Moment] = functools.partial(now, device) if on_device else time.perf_counter_ns

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises adds no time."""
        self.open()
        yield
        self.close()

    def open(self) -> None:
        """Begin a step."""
        if self._progress is not None:
            self._progress.advance()
        if not self._began_ns:
            begin_measured_steps()
        memory_bytes = None if len(self._began_ns) % self._memory_every else memory_in_use(self.device)
        self._open = _OpenStep(memory_bytes, time.time_ns(), self._now())

    def close(self) -> bool:
        """End the step that has begun, and return whether there was one."""
        if (step := self._open) is None:
            return False
        self._moments.append((step.begin, self._now(), step.pauses))
        self._ended_ns.append(time.time_ns())
        self._began_ns.append(step.began_ns)
        if step.memory_bytes is not None:
            self._memory_bytes.append(step.memory_bytes)
            if len(self._memory_bytes) == MOST_READINGS:
                del self._memory_bytes[1::2]
                self._memory_every *= 2
        self._open = None
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body out of the time of the step that has begun, if there is one."""
        step, begin = self._open, self._now()
        yield
        if step is not None:
            step.pauses.append((begin, self._now()))

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended."""
        return len(self._ended_ns)

    @property
    def spans_ns(self) -> list[tuple[int, int]]:
        """When the host entered and left each step, on the clock of ``time.time_ns``."""
        return list(zip(self._began_ns, self._ended_ns, strict=True))

    def step_times_ms(self) -> list[float]:
        """Return every step's duration in order, in milliseconds, and wait for the device."""
        self._times_ms += [
            elapsed_ms(begin, end) - sum(elapsed_ms(*pause) for pause in pauses) for begin, end, pauses in self._moments
        ]
        self._moments.clear()
        return list(self._times_ms)

    def collective_ms(self) -> list[float]:
        """Return the milliseconds that each of the last steps spent in collectives.

        The list covers all steps, or as many of the last steps as NCCL has recorded. The list is empty on CPU, where a
        wait depends on the other ranks: this rank writes its arrivals at collectives into a file, and the waits are
        computed later from the files of all ranks. Call this after :meth:`step_times_ms` and before leaving the process
        group.
        """
        if not on_accelerator(self.device):
            _leave_arrivals(self._began_ns, self._ended_ns)
            return []
        return _waits_of_steps_ms(_recorded_collectives(), self._began_ns, self._ended_ns)

    def memory_bytes(self) -> list[int]:
        """Return the bytes in use before evenly spaced steps: allocated on the device, or resident on CPU."""
        return list(self._memory_bytes)


# NCCL's watchdog checks every 100 ms which collectives have ended.
_RETIRED_WITHIN_S = 2.0
_BATCH = "nccl:coalesced"


def _waits_of_steps_ms(
    collectives: Sequence[dict[str, Any]], began_ns: Sequence[int], ended_ns: Sequence[int]
) -> list[float]:
    """Return the milliseconds spent in collectives, for each step that the record covers completely.

    Collectives between steps, e.g. of a loss for a log, are part of no step. A record that is too small covers only the
    last steps. Steps before the first recorded collective are left out; if any collective within the covered steps has
    no duration, the result is empty. Parts of a batch of sends and receives do not count: the recorder has one entry
    with a duration for the batch.

    Args:
        collectives: entries of NCCL's flight recorder.
        began_ns: when the host entered each step, on the clock of ``time.time_ns``.
        ended_ns: when the host left each step.
    """
    collectives = _without_parts(collectives)
    created_ns = [entry["time_created_ns"] for entry in collectives]
    if not created_ns or not began_ns:
        return []
    # The oldest remaining entry may be from the middle of its step.
    first = 0 if min(created_ns) < began_ns[0] else bisect_right(began_ns, min(created_ns))
    sums_ms = [0.0] * len(began_ns)
    for entry, created in zip(collectives, created_ns, strict=True):
        step = bisect_right(began_ns, created) - 1
        if step < first or created > ended_ns[step]:
            continue
        if entry.get("duration_ms") is None:
            return []
        sums_ms[step] += entry["duration_ms"]
    return sums_ms[first:]


def _leave_arrivals(began_ns: Sequence[int], ended_ns: Sequence[int]) -> None:
    """Write this rank's steps and its arrivals at collectives into the rank's folder, if the launch names one."""
    folder = os.environ.get(variables.RANK_FOLDER)
    entries = flight_records("fr")
    if not folder or entries is None:
        return
    # The record is a ring: its first entry has the number 0 until a later entry replaces the first entry.
    is_whole = any(entry["record_id"] == 0 for entry in entries)
    last_ns = max(ended_ns, default=0)
    document = Arrivals(
        began_ns=list(began_ns),
        ended_ns=list(ended_ns),
        known_from_ns=0 if is_whole else min((entry["time_created_ns"] for entry in entries), default=last_ns),
        arrived_ns={_name(entry): entry["time_created_ns"] for entry in entries if not entry["is_p2p"]},
    )
    write_json(Path(folder) / ARRIVALS_FILE, to_builtins(document), durable=False)


def _name(entry: dict[str, Any]) -> str:
    """Return a name of a collective that is the same on every rank, with the name and description of its group."""
    return f"{' '.join(entry['process_group'])}/{entry['collective_seq_id']}/{entry['profiling_name']}"


def _recorded_collectives() -> list[dict[str, Any]]:
    """Return NCCL's record of this rank once the watchdog has retired every collective; empty if torch has no NCCL."""
    deadline_s = time.monotonic() + _RETIRED_WITHIN_S
    while entries := flight_records("nccl"):
        if all(entry.get("retired") for entry in _without_parts(entries)) or time.monotonic() > deadline_s:
            return entries
        time.sleep(0.02)
    return []


def _without_parts(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the sends and receives of batches, which never retire and never get a duration.

    Only the batch does, as ``nccl:coalesced`` (https://github.com/pytorch/pytorch/issues/137969).
    """
    has_batches = any(entry.get("profiling_name") == _BATCH for entry in entries)
    return [
        entry
        for entry in entries
        if not (has_batches and entry.get("is_p2p")) or entry.get("retired") or entry["profiling_name"] == _BATCH
    ]


def measure(
    run_step: Callable[[int, StepTimer], None], num_steps: int, device: torch.device
) -> tuple[StepTimer, float]:
    """Run the measured steps; return their timer and the wall time of all steps in seconds; collective.

    On an accelerator the peak of allocated memory is reset before the first step.

    Args:
        run_step: Runs one step, given its number and the timer, with ``timer.step()`` around the part to be timed.
        num_steps: Number of steps; their numbers begin at 0.
        device: Device that the steps run on.
    """
    timer = StepTimer(device)
    # Ranks enter together and with empty streams, since the first step would otherwise include earlier work.
    synchronize(device)
    dist.barrier()
    if on_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
    reset_peak_memory()
    began_s = time.perf_counter()
    for number in range(num_steps):
        run_step(number, timer)
    synchronize(device)
    return timer, time.perf_counter() - began_s


_REPETITIONS = 9
# Sizes that take about a millisecond each: long enough to time, and short compared with a launch.
_GEMM_SIZE, _DEVICE_GEMM_SIZE = 256, 6144
_REDUCED_ELEMENTS, _DEVICE_REDUCED_ELEMENTS = 1 << 14, 1 << 25


def run_canary(device: torch.device) -> dict[str, float]:
    """Return the median milliseconds ``gemm_ms`` and ``all_reduce_ms`` on ``device``; collective.

    The result is empty without a process group, and in a simulated world, which exchanges nothing.
    """
    if not dist.is_initialized() or is_simulated():
        return {}
    reducing = group_device(device)
    size, dtype = (_DEVICE_GEMM_SIZE, torch.bfloat16) if on_accelerator(device) else (_GEMM_SIZE, torch.float32)
    elements = _DEVICE_REDUCED_ELEMENTS if on_accelerator(reducing) else _REDUCED_ELEMENTS
    # Constant operands, since drawing random numbers would change the workload's random numbers.
    operand = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    product, reduced = torch.empty_like(operand), torch.ones(elements, device=reducing)
    times_ms: dict[str, list[float]] = {"gemm_ms": [], "all_reduce_ms": []}
    for _ in range(_REPETITIONS):
        times_ms["gemm_ms"].append(_timed_ms(device, lambda: torch.mm(operand, operand, out=product)))
        dist.barrier()
        times_ms["all_reduce_ms"].append(_timed_ms(reducing, lambda: dist.all_reduce(reduced, dist.ReduceOp.MAX)))
    # The first two repetitions warm up.
    return {name: median(values[2:]) for name, values in times_ms.items()}


def _timed_ms(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    began_ns = time.perf_counter_ns()
    work()
    synchronize(device)
    return (time.perf_counter_ns() - began_ns) / 1e6


class Delay:
    """A callable that occupies the current stream, or the CPU rank, for ``delay_ms`` milliseconds."""

    def __init__(self, device: torch.device, delay_ms: float) -> None:
        """Calibrate the delay; on an accelerator this waits for the device."""
        self._device, self._delay_ms = device, delay_ms
        if delay_ms and on_accelerator(device):
            cycles_per_ms(device)

    def __call__(self) -> None:
        """Occupy the stream or the rank once; on an accelerator the host does not wait."""
        if on_accelerator(self._device):
            spin(self._delay_ms, self._device)
            return
        # A rank that slept would look like a rank that waits for its peers.
        end_s = time.perf_counter() + self._delay_ms / 1e3
        while time.perf_counter() < end_s:
            pass


# Operators of convolutions, whose formulas need the shape of the result, and their arguments by position.
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
_CONVOLUTION_BACKWARD = "aten::convolution_backward"


def wrapper_problem() -> str:
    """Return why a step can't be profiled under the profiler that the ranks run under; empty if it can."""
    profiler = os.environ.get(variables.PROFILER)
    is_wrapped = profiler in WRAPPERS
    return f"{profiler} profiles the ranks, and a device serves one profiler at a time" if is_wrapped else ""


def flops_of(name: str, args: Mapping[str, Any]) -> int | None:
    """Return the operations of one operator of a trace by torch's registry of formulas; None if it has no formula.

    Args:
        name: The operator's name in the trace, such as ``aten::mm``.
        args: The arguments of the trace's event, with shapes and concrete values.
    """
    if (found := _formulas().get(name)) is None:
        return None
    formula, num_positional = found
    given: list[Any] = [
        torch.Size(dims) if kind not in ("", "Scalar", "ScalarList", "TensorList") else _literal(value)
        for kind, dims, value in zip(
            args.get("Input type", ()), args.get("Input Dims", ()), args.get("Concrete Inputs", ()), strict=False
        )
    ][:num_positional]
    try:
        if name in _CONVOLUTIONS:
            left, weight, _, stride, padding, dilation, transposed, *_ = given
            shape = None if transposed else _convolved(left, weight, stride, padding, dilation)
            return int(formula(*given, out_val=shape))
        if name == _CONVOLUTION_BACKWARD:
            return int(formula(*given, out_val=(given[1], given[2], None)))
        return int(formula(*given))
    # Registered formulas refuse arguments that they were not written for with errors of any kind.
    except Exception:  # noqa: BLE001
        return None


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None


def _convolved(
    left: torch.Size, weight: torch.Size, stride: list[int], padding: list[int], dilation: list[int]
) -> torch.Size:
    sizes = zip(left[2:], weight[2:], stride, padding, dilation, strict=True)
    inner = [(size + 2 * pad - step * (width - 1) - 1) // by + 1 for size, width, by, pad, step in sizes]
    return torch.Size([left[0], weight[0], *inner])


@functools.cache
def _formulas() -> dict[str, tuple[Callable[..., Any], int]]:
    """Return the name of each operator that has a formula -> the formula, and the number of positional arguments."""
    from torch.utils.flop_counter import flop_registry

    found = {}
    # The registry also has formulas of higher-order operators and of kernels of Triton.
    for packet in (key for key in flop_registry if isinstance(key, torch._ops.OpOverloadPacket)):
        arguments = getattr(packet, packet.overloads()[0])._schema.arguments
        name = str(packet).replace(".", "::", 1)
        found[name] = flop_registry[packet], sum(not argument.kwarg_only for argument in arguments)
    return found


def calls_by_step(spans_ns: Sequence[tuple[int, int]]) -> float | None:
    """Return the mean number of collectives that this rank began in steps; None if torch has not recorded them.

    ``spans_ns`` are the begin and end of each step by ``time.time_ns``.
    """
    entries = [entry for recorder in ("fr", "nccl") for entry in flight_records(recorder) or ()]
    if not entries or not spans_ns:
        return 0.0
    created_ns = sorted(entry["time_created_ns"] for entry in entries if not entry["is_p2p"])
    # The record is a ring, which may have lost the begin of its first step.
    is_whole = any(entry["record_id"] == 0 for entry in entries)
    first_ns = min(entry["time_created_ns"] for entry in entries)
    covered = [span for span in spans_ns if is_whole or span[0] >= first_ns]
    counts = [bisect_right(created_ns, end) - bisect_left(created_ns, begin) for begin, end in covered]
    return fmean(counts) if counts else None


def recorded_calls(began_ns: int, ended_ns: int, device: torch.device) -> list[RecordedCall]:
    """Return the collectives that this rank began in a stretch of time, in order, by the recorder of CPU backends."""
    if on_accelerator(device):
        return []  # NCCL's record of a collective is a part of the trace
    if is_simulated():
        return requested_calls(began_ns, ended_ns)
    names = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", {})
    sizes = {str(name): group.size() for group, name in names.items()}
    return [
        RecordedCall(
            group := str(entry["process_group"][0]),
            sizes.get(group),
            str(next(iter(entry["input_dtypes"] or entry["output_dtypes"]), "")),
        )
        for entry in flight_records("fr") or ()
        if not entry["is_p2p"] and began_ns <= entry["time_created_ns"] <= ended_ns
    ]


def costs_of(trace: Mapping[str, Any], device: torch.device, recorded: Sequence[RecordedCall], lines: Lines) -> Costs:
    """Return the costs of the first step of a trace with shapes, with their places if ``lines`` were noted."""
    on_device = on_accelerator(device)
    return costs_of_step(trace, flops_of, on_device=on_device, recorded=recorded, moments=lines.moments)


def profiler_of(device: torch.device, *, host: bool = True, shapes: bool = False, memory: bool = False) -> profile:
    """Return a profiler of a device's work, of the operators of the host, their shapes, and allocations."""
    kind = device.type if on_accelerator(device) else None
    return profile(use_cpu=host, use_kineto=True, use_device=kind, record_shapes=shapes, profile_memory=memory)


class Exported:
    """The trace of a profiler that has ended, written at once: the next profiler takes its device activity away."""

    def __init__(self, profiler: profile) -> None:
        with tempfile.TemporaryDirectory(prefix="aorta-trace-") as folder:
            self._path = Path(folder) / "trace.json"
            # torch writes the path that it is given into JSON as it is, with the quotation marks of TMPDIR.
            at = os.open(folder, os.O_PATH)
            profiler.export_chrome_trace(f"/proc/self/fd/{at}/{self._path.name}")
            os.close(at)
            try:
                check_size(self._path)
                self._text: bytes | TraceTooLarge = self._path.read_bytes()
            except TraceTooLarge as error:
                self._text = error

    def read(self) -> dict[str, Any]:
        """Return the document.

        Raises:
            TraceTooLarge: The trace is too large to be read.
        """
        if isinstance(self._text, TraceTooLarge):
            raise self._text
        return parse_trace(self._path, self._text)


# The profilers of the script that have been prepared, by id. Torch has one profiler per thread, and loses one that is
# prepared and does not run yet when another one begins.
prepared: set[int] = set()


def script_profiles() -> bool:
    """Return whether a profiler of the script runs or is prepared."""
    return bool(prepared) or _profiler_enabled()


class StepCounter:
    """Counter of the costs of one step of a script, whose number of steps is not known.

    The trace is parsed when the script has ended, so that no rank waits for another one's parsing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._problem = ""
        self._trace: Exported | None = None
        self._recorded: list[RecordedCall] = []
        self._lines = Lines()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the body as the step."""
        self._problem = wrapper_problem()
        if not self._problem and script_profiles():
            self._problem = "the script runs torch.profiler in its warm-up steps, and torch has one profiler per thread"
        if self._problem:
            yield
            return
        own = profiler_of(self._device, shapes=True)
        with own:
            self._boundary()
            began_ns = time.time_ns()
            with self._lines:
                yield
            self._boundary()
            if not _profiler_enabled():
                self.give_way()
        self._recorded = recorded_calls(began_ns, time.time_ns(), self._device)
        self._trace = None if self._problem else Exported(own)

    def give_way(self) -> None:
        """Give the count up for a profiler of the script."""
        self._problem = "the script runs torch.profiler in its warm-up steps, which ended the count of costs"

    def _boundary(self) -> None:
        with record_function(BOUNDARY):
            pass

    def costs(self) -> Costs:
        """Return the costs of the step and the compilations since the measured steps began."""
        if self._problem or self._trace is None:
            return Costs(problem=self._problem or "no step was counted, since the step was not completed")
        try:
            trace = self._trace.read()
        except TraceTooLarge as error:
            return Costs(problem=f"the trace of one step has {excess(error.num_bytes, error.num_values)}")
        return with_compilations(costs_of(trace, self._device, self._recorded, self._lines))

    def overlap(self) -> Profile:
        """Return the overlap of the step on CPU ranks; its kernels on a device would need a head start of the host."""
        if self._problem or self._trace is None or on_accelerator(self._device):
            return Profile(problem=self._problem or "overlap on a device is measured between steps of an optimizer")
        try:
            return overlap_of_cpu(self._trace.read())
        except TraceTooLarge as error:
            return Profile(problem=f"the trace of one step has {excess(error.num_bytes, error.num_values)}")


# Compiled frames when the measured steps began; None before, or where nothing was compiled until then.
_compiled_before: int | None = None


def begin_measured_steps() -> None:
    """Remember what torch.compile has compiled so far; the steps from here on should compile nothing."""
    global _compiled_before
    _compiled_before = _counters()[0]


def with_compilations(costs: Costs) -> Costs:
    """Return costs with the compilations since :func:`begin_measured_steps`, and all graph breaks."""
    compiled, breaks = _counters()
    number = compiled - (_compiled_before or 0)
    places = {Cost.RECOMPILATIONS: {str(Cost.RECOMPILATIONS): _compiled(number)}} if is_locating() and number else {}
    return costs.replace(recompilations=number, graph_breaks=breaks, places=costs.places | places)


def _compiled(number: int) -> dict[str, int]:
    """Return the functions of dynamo's last compilations and what had changed, with their numbers."""
    metrics = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-number:]
    found = Counter(
        f"{one.co_name} at {shown(one.co_filename or '')}:{one.co_firstlineno}"
        # Such as "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3".
        + "".join(f", {why}" for why in [(one.recompile_reason or "").partition(": ")[2].partition(". ")[0]] if why)
        for one in metrics
    )
    return {text[:200]: calls for text, calls in found.items()}


def _counters() -> tuple[int, int]:
    """Return the frames that dynamo compiled and its graph breaks; dynamo is not imported for this."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    frames, breaks = counters.get("frames", {}), counters.get("graph_break", {})
    return int(frames.get("total", 0)), sum(breaks.values())
