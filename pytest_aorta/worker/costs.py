"""Costs of one step: operators and their operations, groups of collectives, compilations and their places."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from pytest_aorta.common.clock import time
from pytest_aorta.common.files import without_collection
from pytest_aorta.result.trace.kineto import BOUNDARY, TraceTooLarge, excess, overlap_of_cpu
from pytest_aorta.result.trace.kineto_costs import RecordedCall, costs_of_step
from pytest_aorta.result.trace.profiled_steps import Cost, Costs, Profile
from pytest_aorta.worker.accelerator import on_accelerator
from pytest_aorta.worker.collectives import recorded_calls
from pytest_aorta.worker.flops import flops_of, is_view
from pytest_aorta.worker.lines import Lines, shown
from pytest_aorta.worker.profiling import Exported, ScriptProfiler
from pytest_aorta.worker.streams import marked_streams
from pytest_aorta.worker.torch_private import dynamo_utils

# The warm-up steps that costs need: one that is counted, and one that settles after it.
STEPS_TO_COUNT = 2
NOT_COUNTED = (
    f"costs are counted in a warm-up step, and there are fewer than {STEPS_TO_COUNT}: give recorder.start() or "
    f"record_optimizer_steps() warmup={STEPS_TO_COUNT}, and run as many steps more"
)


def costs_of(trace: Mapping[str, Any], device: torch.device, recorded: Sequence[RecordedCall], lines: Lines) -> Costs:
    """Return the costs of the first step of a trace with shapes, with their places, as far as ``lines`` were noted."""
    on_device = on_accelerator(device)
    return costs_of_step(trace, flops_of, is_view, on_device=on_device, recorded=recorded, moments=lines.moments)


class StepCounter(ScriptProfiler):
    """Counter of the costs of one step of a script, whose number of steps is not known.

    The trace is parsed when the script has ended, so that no rank waits for another one's parsing.
    """

    where, what = "in its warm-up steps", "count of costs"
    _trace: Exported | None = None
    _recorded: Sequence[RecordedCall] = ()

    @contextmanager
    def step(self, *, locates: bool = True) -> Iterator[None]:
        """Count the body as the step, more slowly if its lines are noted; a body that raises is not counted."""
        self.begin(locates=locates)
        try:
            yield
        except BaseException:
            self.end()
            self._trace = None
            raise
        self.end()

    def begin(self, *, locates: bool = True) -> None:
        """Begin the step."""
        self._lines, self._marked = Lines(), ExitStack()
        if self.is_free():
            self.start(shapes=True)
            _leave_boundary()
            self._began_ns = time.time_ns()
            if locates:
                self._marked.enter_context(marked_streams(self.device))
            self._lines.__enter__()

    def end(self) -> None:
        """End the step, if it is counted."""
        if self.is_running:
            self._lines.__exit__()
            self._marked.close()
            _leave_boundary()
            self._trace = self.stop()
            self._recorded = recorded_calls(self._began_ns, time.time_ns(), self.device)

    # The first boundary of steps ends the counted one.
    boundary = end

    # Until the trace is dropped: a collection would visit each of its values.
    @without_collection()
    def costs(self) -> Costs:
        """Return the costs of the step and the compilations since the measured steps began."""
        if self.problem or self._trace is None:
            return Costs(problem=self.problem or "no step was counted, since the step was not completed")
        try:
            trace = self._trace.read()
        except TraceTooLarge as error:
            return Costs(problem=f"the trace of one step has {excess(error.num_bytes, error.num_values)}")
        return with_compilations(costs_of(trace, self.device, self._recorded, self._lines))

    def overlap(self) -> Profile:
        """Return the overlap of the step on CPU ranks; its kernels on a device would need a head start of the host."""
        if self.problem or self._trace is None or on_accelerator(self.device):
            return Profile(problem=self.problem or "overlap on a device is measured between steps of an optimizer")
        try:
            return overlap_of_cpu(self._trace.read())
        except TraceTooLarge as error:
            return Profile(problem=f"the trace of one step has {excess(error.num_bytes, error.num_values)}")


def _leave_boundary() -> None:
    with record_function(BOUNDARY):
        pass


@dataclass(frozen=True)
class _Compilations:
    """The work of torch.compile in this process so far: frames, graphs, breaks between graphs, and time."""

    frames: int = 0
    graphs: int = 0
    breaks: int = 0
    seconds: float = 0.0


# Before the measured steps began.
_before = _Compilations()


def begin_measured_steps() -> None:
    """Remember what torch.compile has compiled so far; the steps from here on should compile nothing."""
    global _before
    _before = _compilations()


def compile_s() -> float:
    """Return the seconds that torch.compile took before the measured steps."""
    return _before.seconds


def with_compilations(costs: Costs) -> Costs:
    """Return costs with the graphs before :func:`begin_measured_steps`, later compilations, and all graph breaks."""
    now = _compilations()
    number = now.frames - _before.frames
    # A backward pass has an entry of its own, without the function.
    known = [one for one in dynamo_utils().get_compilation_metrics() if one.co_name] if now.frames else []
    first = max(0, len(known) - number)
    parts = {Cost.COMPILED_GRAPHS: known[:first], Cost.RECOMPILATIONS: known[first:]}
    places = {cost: {str(cost): _compiled(metrics)} for cost, metrics in parts.items() if metrics}
    return costs.replace(
        compiled_graphs=_before.graphs, recompilations=number, graph_breaks=now.breaks, places=costs.places | places
    )


def _compiled(metrics: Sequence[Any]) -> dict[str, int]:
    """Return the functions of dynamo's compilations and what had changed, with their numbers."""
    found = Counter(
        f"{one.co_name} at {shown(one.co_filename or '')}:{one.co_firstlineno}"
        # Such as "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3".
        + "".join(f", {why}" for why in [(one.recompile_reason or "").partition(": ")[2].partition(". ")[0]] if why)
        for one in metrics
    )
    return {text[:200]: calls for text, calls in found.items()}


def _compilations() -> _Compilations:
    """Return what dynamo has compiled; dynamo is not imported for this."""
    if (dynamo := dynamo_utils()) is None:
        return _Compilations()
    frames, stats, breaks = (dynamo.counters.get(name, {}) for name in ("frames", "stats", "graph_break"))
    spent_ns = sum(dynamo.cumulative_time_spent_ns.get(f"entire_{part}_compile", 0) for part in ("frame", "backward"))
    return _Compilations(frames.get("total", 0), stats.get("unique_graphs", 0), sum(breaks.values()), spent_ns / 1e9)
