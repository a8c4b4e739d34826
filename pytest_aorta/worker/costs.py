"""The costs of a step on a rank: operations by torch's formulas, groups of collectives, and compilations."""

from __future__ import annotations

import ast
import functools
import os
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled

# The classes of torch.profiler import inductor when they start, which takes seconds; these take milliseconds.
from torch.autograd.profiler import profile, record_function

from pytest_aorta.common import variables
from pytest_aorta.plan.profiler import WRAPPERS
from pytest_aorta.result.trace.costs import Cost, Costs
from pytest_aorta.result.trace.kineto_costs import RecordedCall, costs_of_step
from pytest_aorta.result.trace.kineto_events import BOUNDARY, TraceTooLarge, check_size, excess, parse_trace
from pytest_aorta.result.trace.rank_files import flight_records
from pytest_aorta.worker.accelerator import on_accelerator
from pytest_aorta.worker.lines import Lines, is_locating, shown
from pytest_aorta.worker.simulation import is_simulated, requested_calls

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
    covered = [span for span in spans_ns if is_whole or span[0] >= created_ns[0]]
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
            profiler.export_chrome_trace(str(self._path))
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
        if not self._problem and _profiler_enabled():
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
                self._problem = "the script runs torch.profiler in its warm-up steps, which ended the count of costs"
        self._recorded = recorded_calls(began_ns, time.time_ns(), self._device)
        self._trace = None if self._problem else Exported(own)

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
