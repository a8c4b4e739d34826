"""Profiled steps of real work, in one process with gloo, under the profiler of this version of torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.kineto import overlap_of_trace, read_trace
from pytest_aorta.worker import capture_overlap, profiled
from pytest_aorta.worker.overlap import profile as overlap
from tests.unit.kineto_traces import boundary, kernel, trace

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
            # True on a busy machine too: gloo's reduce-scatter completes in the wait for it.
            for _ in range(200):
                if work.is_completed():
                    break
                torch.mm(self.operand, self.operand, out=self.product)
            work.wait()


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_beside_products_are_hidden_and_in_line_they_are_not(group):
    beside, in_line = (capture_overlap(Training(beside=hidden).step, 3, CPU) for hidden in (True, False))
    for capture in (beside, in_line):
        assert len(capture.steps) == 3
        for step in capture.steps:
            assert step.broken_rule() is None
            assert set(step.collectives) == {"all_gather", "reduce_scatter"}
            assert step.compute_ms > 0
    assert in_line.metrics()["overlap_ratio"] < 0.1 < 0.3 < beside.metrics()["overlap_ratio"]
    assert {"compute", "all_gather", "reduce_scatter"} <= set(beside.timeline)


def test_step_is_run_once_more_than_it_is_profiled():
    training = Training(beside=True)
    capture = capture_overlap(lambda: setattr(training, "count", training.count + 1), 4, CPU)
    assert (training.count, len(capture.steps)) == (5, 4)
    assert "overlap_ratio" not in capture.metrics()


def test_step_time_is_that_of_the_step():
    capture = capture_overlap(lambda: time.sleep(0.02), 2, CPU)
    assert all(20 <= step.step_ms < 200 for step in capture.steps)
    assert all(step.idle_ms > 19 for step in capture.steps)


def test_trace_is_kept_where_it_is_asked_for_and_reads_the_same(group, tmp_path, monkeypatch):
    path = tmp_path / "mine.json.gz"
    capture = capture_overlap(Training(beside=True).step, 2, CPU, trace_path=path)
    assert overlap_of_trace(read_trace(path), on_device=False) == capture
    assert read_trace(path)["distributedInfo"] == {"rank": 0, "world_size": 1, "backend": "gloo"}
    monkeypatch.setenv("AORTA_RANK_FOLDER", str(tmp_path))
    capture_overlap(Training(beside=True).step, 1, CPU)
    assert not (tmp_path / "trace.json.gz").exists()
    monkeypatch.setenv("AORTA_PROFILER", "torch")
    capture = capture_overlap(Training(beside=True).step, 1, CPU)
    assert overlap_of_trace(read_trace(tmp_path / "trace.json.gz"), on_device=False) == capture


class FakeProfiler:
    """A stand-in for the profiler that logs what it was asked to record and returns the next given trace."""

    asked: ClassVar[list[dict]] = []
    traces: ClassVar[list[dict]] = []

    def __init__(self, **options):
        self.asked.append(options)

    def __enter__(self):
        return self

    def __exit__(self, *_raised):
        pass

    def export_chrome_trace(self, path):
        Path(path).write_text(json.dumps(self.traces.pop(0)))


def test_device_is_recorded_alone_and_read_by_the_step_before(monkeypatch, tmp_path):
    learned = trace(
        boundary(0, 1, 50), kernel(GENERIC, 60, 10, **{"Collective name": "alltoall"}), boundary(30, 2, 150)
    )
    alone = trace(
        *(kernel("fill", begin, 1) for begin in (50, 150, 250)), *(kernel(GENERIC, at, 10) for at in (60, 160))
    )
    monkeypatch.setattr(overlap, "profile", FakeProfiler)
    monkeypatch.setattr(overlap, "_new_mark", lambda _device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    FakeProfiler.asked.clear()
    FakeProfiler.traces[:] = [learned, alone, learned]
    training = Training(beside=True)
    training.step = lambda: setattr(training, "count", training.count + 1)
    kept = tmp_path / "kept.json.gz"
    capture = capture_overlap(training.step, 2, torch.device("cuda"), trace_path=kept)
    assert [set(step.collectives) for step in capture.steps] == [{"all_to_all"}] * 2
    assert [options["use_cpu"] for options in FakeProfiler.asked] == [True, False, True]
    # One step for the host's events, one before the first boundary and two captured steps, then two of the kept trace.
    assert training.count == 1 + 1 + 2 + 2
    assert overlap_of_trace(read_trace(kept), on_device=True).steps


def test_no_steps_leave_the_result_alone_and_run_nothing():
    result, training = RankResult(True, 0, 1, 1, [1.0], 0.1), Training(beside=True)
    assert profiled(result, training.step, 0, CPU) is result
    assert training.count == 0


@pytest.mark.parametrize("num_steps", [0, -1])
def test_capture_of_no_steps_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}, allowed is an integer from 1"):
        capture_overlap(lambda: None, num_steps, CPU)


def test_profiler_does_not_load_the_compiler():
    code = (
        "import sys, torch; from pytest_aorta.worker import capture_overlap\n"
        "capture_overlap(lambda: torch.ones(3) + 1, 1, torch.device('cpu'))\n"
        "assert 'torch._inductor' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
