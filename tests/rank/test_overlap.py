"""Profiled steps of real work, in one process with gloo, under the profiler of this version of torch."""

import json
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from pytest_aorta.result.trace import kineto as reading
from pytest_aorta.result.trace.kineto import overlap_of_cpu
from pytest_aorta.result.trace.profiled_steps import Profile
from pytest_aorta.worker import capture_overlap, overlap, profiled, profiling
from tests.rank.ranks import own_group
from tests.unit.builders import as_rank_of, broken_rule, each_of, make_plan, make_rank, run_python
from tests.unit.kineto_traces import boundary, event, kernel, overlap_with_host, read_trace, trace

GENERIC = "ncclDevKernel_Generic_1"
CPU = torch.device("cpu")
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Training:
    """A step of all-gather, products and reduce-scatter; collectives run in line or beside the products."""

    def __init__(self, *, beside: bool) -> None:
        self.beside, self.count = beside, 0
        self.operand, self.product = torch.ones(256, 256), torch.empty(256, 256)
        self.shard, self.gathered = torch.ones(1 << 22), torch.empty(1 << 22)

    def step(self) -> None:
        self.count += 1
        for collective in (_all_gather, _reduce_scatter):
            work = collective(self.gathered, self.shard, async_op=True)
            if not self.beside:
                work.wait()
            torch.mm(self.operand, self.operand, out=self.product)
            # Repeat until the collective has completed, on a busy machine too; gloo's reduce-scatter completes in the
            # wait for it.
            for _ in range(200):
                if work.is_completed():
                    break
                torch.mm(self.operand, self.operand, out=self.product)
            work.wait()


@pytest.fixture
def group(tmp_path):
    with own_group(tmp_path):
        yield


@pytest.fixture
def keeping(group, tmp_path, monkeypatch):
    """Keep traces in the test's folder, as a launch under torch's profiler does."""

    def keep():
        return as_rank_of(make_plan(tmp_path, profiler="torch"), monkeypatch)

    return keep


def test_collectives_beside_products_are_hidden_and_in_line_they_are_not(group):
    beside, in_line = (capture_overlap(Training(beside=hidden).step, 3, CPU) for hidden in (True, False))
    for capture in (beside, in_line):
        assert len(capture.steps) == 3
        for step in capture.steps:
            assert broken_rule(step) is None
            assert set(step.collectives) == {"all_gather", "reduce_scatter"}
            assert step.compute_ms > 0
    assert in_line.metrics()["overlap_ratio"] < 0.1 < 0.3 < beside.metrics()["overlap_ratio"]
    assert {"compute", "all_gather", "reduce_scatter"} <= set(beside.timeline)


def test_step_is_run_once_more_than_it_is_profiled_and_has_its_time():
    training = Training(beside=True)
    training.step = lambda: setattr(training, "count", training.count + 1) or time.sleep(0.02)
    capture = capture_overlap(training.step, 2, CPU)
    assert (training.count, len(capture.steps)) == (3, 2)
    assert all(20 <= step.step_ms < 20_000 and step.idle_ms > 19 for step in capture.steps)
    assert "overlap_ratio" not in capture.metrics()


def test_trace_is_kept_where_it_is_asked_for_and_reads_the_same(group, tmp_path, monkeypatch):
    path = tmp_path / "mine.json.gz"
    capture = capture_overlap(Training(beside=True).step, 2, CPU, trace_path=path)
    assert overlap_of_cpu(read_trace(path)) == capture
    assert read_trace(path)["distributedInfo"] == {"rank": 0, "world_size": 1, "backend": "gloo"}
    assert read_trace(path)["headStart"] is False
    unasked = as_rank_of(make_plan(tmp_path / "unasked"), monkeypatch)
    capture_overlap(Training(beside=True).step, 1, CPU)
    assert not (unasked / "trace.json.gz").exists()
    asked = as_rank_of(make_plan(tmp_path / "asked", profiler="torch"), monkeypatch)
    capture = capture_overlap(Training(beside=True).step, 1, CPU)
    kept = read_trace(asked / "trace.json.gz")
    assert overlap_of_cpu(kept) == capture
    # Shapes and allocations are recorded on request.
    assert not [one for one in kept["traceEvents"] if one["name"] == "[memory]" or "Input Dims" in one.get("args", {})]


@pytest.mark.parametrize(("limit", "unit"), [("MAX_TRACE_BYTES", "bytes"), ("MAX_TRACE_VALUES", "values")])
def test_trace_beyond_the_limits_costs_the_overlap_and_nothing_else(keeping, monkeypatch, limit, unit):
    folder = keeping()
    monkeypatch.setattr(reading, limit, 2_000)
    result = make_rank([1.0])
    with pytest.warns(UserWarning, match="overlap is not measured: the trace of one profiled step has"):
        found = profiled(result, Training(beside=True).step, 1, CPU)
    assert found.replace(profile=Profile(), costs=None) == result
    assert found.costs.problem == found.profile.problem
    assert re.fullmatch(
        rf"the trace of one profiled step has [\d,]+ {unit} on the largest rank, and at most 2,000 are read; set "
        r"profile_steps: 0 to measure without overlap, or use fewer micro-batches per step",
        found.profile.problem,
    )
    assert list(folder.glob("trace*")) == []


class FakeProfiler:
    """A stand-in for the profiler that logs its arguments and returns the next given trace."""

    asked: ClassVar[list[dict]] = []
    traces: ClassVar[list[dict]] = []
    is_on: ClassVar[bool] = False

    def __init__(self, **options):
        self.asked.append(options)

    def __enter__(self):
        FakeProfiler.is_on = True
        return self

    def __exit__(self, *_raised):
        FakeProfiler.is_on = False

    def export_chrome_trace(self, path):
        Path(path).write_text(json.dumps(self.traces.pop(0)))


@pytest.fixture
def device(monkeypatch):
    """A CUDA device that exists in name only: no kernel runs, and the profiler returns the traces of the test."""
    leads = []
    monkeypatch.setattr(profiling, "profile", FakeProfiler)
    monkeypatch.setattr(overlap, "profiler_enabled", lambda: FakeProfiler.is_on)
    monkeypatch.setattr(overlap, "_new_mark", lambda _device: torch.zeros(1))
    monkeypatch.setattr(overlap, "cycles_per_ms", lambda _device: 1.0)
    monkeypatch.setattr(overlap, "spin", lambda lead_ms, _device: leads.append(lead_ms))
    monkeypatch.setattr(overlap, "synchronize", lambda _device: None)
    monkeypatch.setattr(overlap, "marked_streams", lambda _device: nullcontext())
    FakeProfiler.asked.clear()
    return leads


def with_host(*events):
    return trace(
        boundary(0, 1, 50), kernel(GENERIC, 60, 10, **{"Collective name": "alltoall"}), *events, boundary(30, 2, 150)
    )


def device_alone(*begins_us: float):
    """Return a trace of the device alone, whose boundaries and communication begin as given, in microseconds."""
    return trace(
        *(kernel("fill", begin, 1) for begin in begins_us),
        *(kernel(GENERIC, begin + 10, 10) for begin in begins_us[:-1]),
    )


def of_steps(count):
    return device_alone(*range(50, 51 + 100 * count, 100))


STEADY, DELAYED = (50, 150, 250), (50, 150, 350)


def captured(traces, num_steps=2, **options):
    training = Training(beside=True)
    training.step = lambda: setattr(training, "count", training.count + 1)
    FakeProfiler.traces[:] = traces
    return capture_overlap(training.step, num_steps, torch.device("cuda"), timed_ms=0.1, **options), training.count


def test_device_is_recorded_alone_and_read_by_the_step_before(device, tmp_path):
    kept = tmp_path / "kept.json.gz"
    traces = [with_host(), device_alone(*DELAYED), device_alone(*STEADY), with_host()]
    capture, count = captured(traces, trace_path=kept)
    assert [set(step.collectives) for step in capture.steps] == [{"all_to_all"}] * 2
    assert [options["use_cpu"] for options in FakeProfiler.asked] == [True, False, False, True]
    # One step with the host's side; then, as run and with a head start, two steps after an additional one each; then
    # the two steps of the kept trace.
    assert count == 1 + 3 + 3 + 2
    assert overlap_with_host(read_trace(kept)).steps


LATE_PART = [device_alone(*DELAYED)] * 3
LONGER = device_alone(50, 150, 255)
LONGER["traceEvents"].append(kernel("gemm", 200, 5))


@each_of(
    "traces, attempts, steps_ms, as_run_ms",
    {
        "at once": ([device_alone(*DELAYED), device_alone(*STEADY)], 1, [0.1, 0.1], [0.1, 0.2]),
        "with a longer one": ([*[device_alone(*DELAYED)] * 2, device_alone(*STEADY)], 2, [0.1, 0.1], [0.1, 0.2]),
        # A longer step that is not idle was not delayed.
        "unequal steps": ([LONGER, LONGER], 1, [0.1, 0.105], [0.1, 0.105]),
    },
)
def test_head_start_that_suffices_gives_the_ratio_and_the_idle_time_as_run(
    device, traces, attempts, steps_ms, as_run_ms
):
    capture, _ = captured([with_host(), *traces])
    assert (capture.head_start.succeeded, capture.head_start.attempts) == (True, attempts)
    assert ([step.step_ms for step in capture.steps], [step.step_ms for step in capture.as_run]) == (
        steps_ms,
        as_run_ms,
    )
    assert set(capture.metrics()) == {"overlap_ratio", "exposed_comm_ms", "device_idle_ms"}


@each_of(
    "traces, num_steps, attempts, count",
    {
        "never": ([*LATE_PART, device_alone(*DELAYED)], 2, 3, 13),
        "in half of the steps": ([of_steps(6), *LATE_PART, *LATE_PART], 6, 6, 26),
    },
)
def test_head_start_that_is_too_short_gives_no_ratio_to_compare(device, traces, num_steps, attempts, count):
    capture, ran = captured([with_host(), *traces], num_steps)
    assert (capture.head_start.succeeded, capture.head_start.late_steps, ran) == (False, 0, count)
    assert (len(capture.steps), capture.steps) == (num_steps, capture.as_run)
    assert set(capture.metrics()) == {"overlap_ratio_as_run", "exposed_comm_ms_as_run", "device_idle_ms"}


def test_many_steps_get_head_starts_two_at_a_time(device):
    whole, two, one = map(of_steps, (5, 2, 1))
    capture, count = captured([with_host(), whole, two, device_alone(*DELAYED), two, one], 5)
    assert [step.step_ms for step in capture.steps] == [0.1] * 5
    assert (len(capture.as_run), capture.head_start.attempts, capture.head_start.succeeded) == (5, 2, True)
    # One step with the host's side, then captures of 5, 2, 2, 2 and 1 steps, each after an additional one.
    assert count == 1 + 6 + 3 + 3 + 3 + 2
    assert {time.calls for time in capture.kernels.values()} == {1}
    assert [len(calls.ms) for calls in capture.collectives] == [5]
    first, repeated, longer, last = [lead for lead in device if lead]
    assert (first, longer) == (repeated, 2 * repeated)
    assert capture.head_start.lead_ms == longer
    assert last <= first


def test_steps_after_late_ones_are_captured_and_late_ones_do_not_count(device):
    capture, count = captured([with_host(), of_steps(5), of_steps(2), *LATE_PART, of_steps(1)], 5)
    assert (capture.head_start.succeeded, capture.head_start.attempts, capture.head_start.late_steps) == (True, 3, 2)
    assert [step.step_ms for step in capture.steps] == [0.1] * 3
    assert (len(capture.as_run), capture.head_start.step_ratio) == (5, pytest.approx(1.0))
    assert {time.calls for time in capture.kernels.values()} == {1}
    assert [len(calls.ms) for calls in capture.collectives] == [3]
    assert set(capture.metrics()) == {"overlap_ratio", "exposed_comm_ms", "device_idle_ms"}
    assert count == 1 + 6 + 3 + 3 * 3 + 2


def waiting():
    """Return a step with a call that waits for the device."""
    item = event("cpu_op", "aten::item", 6, 20)
    wait = event("cuda_runtime", "cudaStreamSynchronize", 8, 15)
    return with_host(item, wait, event("cuda_runtime", "cudaLaunchKernel", 6, 1, correlation=9))


@pytest.fixture
def leads_ms(device, monkeypatch):
    """Return the leads of the attempts; the host takes longer than any for the first step."""
    leads_ms = [0.0, 0.0, 0.0]
    monkeypatch.setattr(overlap, "_leads_ms", lambda _host_ms: leads_ms)
    return leads_ms


def test_step_that_waits_for_the_device_is_named_after_a_second_attempt(leads_ms):
    capture, _ = captured([waiting(), *[device_alone(*STEADY)] * 3])
    assert capture.head_start.blocked_by == "cudaStreamSynchronize in aten::item"
    assert (capture.head_start.succeeded, capture.head_start.attempts) == (False, 2)
    assert "overlap_ratio" not in capture.metrics()


def test_steps_that_wait_for_the_device_all_count_as_they_run(leads_ms):
    capture, _ = captured([waiting(), of_steps(3), of_steps(2), of_steps(2)], 3)
    assert (len(capture.steps), capture.steps) == (3, capture.as_run)
    assert [len(calls.ms) for calls in capture.collectives] == [3]


def test_host_that_is_late_once_is_not_blocked(leads_ms):
    leads_ms[:] = [0.0, 60_000.0]
    capture, _ = captured([waiting(), *[device_alone(*STEADY)] * 3])
    assert (capture.head_start.succeeded, capture.head_start.attempts) == (True, 2)
    assert capture.head_start.blocked_by is None


def test_without_profiled_steps_one_step_runs_to_count_its_costs(group):
    result, training = make_rank([1.0]), Training(beside=True)
    found = profiled(result, training.step, 0, CPU)
    assert found.replace(costs=None) == result
    assert (training.count, found.costs.problem) == (1, "")
    assert [(row.kind, row.calls) for row in found.costs.collectives] == [("all_gather", 1), ("reduce_scatter", 1)]


CONVOLVED = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3, requires_grad=True)


@each_of(
    "step, flops",
    {
        "product": (lambda: torch.ones(2, 3) @ torch.ones(3, 4), {"aten::mm": 48}),
        "with a bias": (
            lambda: torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)),
            {"aten::addmm": 48},
        ),
        "convolution and the gradient of its weight": (
            lambda: torch.nn.functional.conv2d(*CONVOLVED, stride=2, padding=1).sum().backward(),
            {"aten::convolution": 8640, "aten::convolution_backward": 8640},
        ),
    },
)
def test_flops_are_those_of_torch_s_formulas(step, flops):
    with FlopCounterMode(display=False) as counter:
        step()
    found = profiled(make_rank([1.0]), step, 0, CPU).costs
    assert found.flops == flops
    assert sum(flops.values()) == counter.get_total_flops()


@pytest.mark.parametrize("num_steps", [0, -1])
def test_capture_of_no_steps_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}, allowed is an integer from 1"):
        capture_overlap(lambda: None, num_steps, CPU)


def test_worker_and_profiler_load_neither_the_compiler_nor_dtensors():
    code = (
        "import sys, torch; from pytest_aorta.worker import capture_overlap\n"
        "capture_overlap(lambda: torch.ones(3) + 1, 1, torch.device('cpu'))\n"
        "assert {'torch._inductor', 'torch.distributed.tensor'}.isdisjoint(sys.modules)"
    )
    ended = run_python("-c", code)
    assert ended.returncode == 0, ended.stderr


def test_step_that_runs_the_profiler_itself_is_refused():
    """Torch has one profiler per thread: the inner one ends the outer, whose export then crashes the process."""

    def step():
        with profile(use_cpu=True):
            torch.ones(3) + 1

    with pytest.raises(RuntimeError, match=r"^the step runs torch\.profiler itself, which ends the capture"):
        capture_overlap(step, 1, CPU)
    assert len(capture_overlap(lambda: torch.ones(3) + 1, 1, CPU).steps) == 1


def test_capture_under_a_profiler_of_the_script_is_refused_and_leaves_it_running():
    with profile(use_cpu=True) as own:
        with pytest.raises(RuntimeError, match=r"^torch\.profiler runs during the steps, and torch has one"):
            capture_overlap(lambda: None, 1, CPU)
        torch.ones(3) + 1
    assert any(one.name == "aten::add" for one in own.function_events)
