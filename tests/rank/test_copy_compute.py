"""Copies that go wrong are found, counted and named, without ranks."""

import threading
from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.common.streams import ThreadStream
from aorta_workloads.copy_compute import CopyComputeWorkload
from aorta_workloads.copy_compute.copies import KINDS, Copy
from aorta_workloads.copy_compute.workload import make_variants

from pytest_aorta.result.folder import steps_entered
from pytest_aorta.worker import StepTimer
from tests.rank.settings import default_config
from tests.unit.builders import as_rank_of, make_plan

CPU = torch.device("cpu")
NUMEL = 2**18


def run_once(kind="h2d", fault="none", check=0):
    copy = Copy(kind, 1, CPU, fault)
    copy.prepare(0, check)
    copy.transfer(False)
    return copy.failure(check, rank=3)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_that_arrives_is_no_failure(kind):
    assert run_once(kind) is None


def test_copy_that_was_not_made_is_reported():
    detail = run_once(fault="skipped_copy", check=1)
    assert (detail.kind, detail.iteration, detail.rank, detail.cause) == ("copy_h2d", 1, 3, "no data arrived")
    assert (detail.index, detail.count, detail.total) == (0, NUMEL, NUMEL)


def test_one_element_that_was_left_out_is_found():
    detail = run_once("d2d", fault="short_copy")
    assert (detail.kind, detail.index, detail.count, detail.total) == ("copy_d2d", NUMEL - 1, 1, NUMEL)
    assert (detail.actual, detail.expected > 0) == (0.0, True)


def test_data_of_another_check_is_no_success():
    copy = Copy("h2d", 1, CPU)
    copy.prepare(0, check=0)
    copy.transfer(False)
    arrived = copy.target.clone()
    copy.prepare(0, check=1)
    copy.target.copy_(arrived)
    assert copy.failure(1, rank=0).cause is None


def test_thread_lane_runs_beside_the_caller_and_in_order():
    stream, entered, may_go, order = ThreadStream(), threading.Event(), threading.Event(), []

    def first(_asynchronous):
        entered.set()
        assert may_go.wait(10)
        order.append(1)

    works = [stream.submit(first), stream.submit(lambda _: order.append(2))]
    assert entered.wait(10)
    assert order == []
    may_go.set()
    for work in works:
        work.wait()
    assert order == [1, 2]


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for():
    work = ThreadStream().submit(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()


def launched(tmp_path, monkeypatch, **config):
    """Run the workload on one rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "AORTA_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    small = {"matrix_size": 8, "gemms": 1, "copy_mb": 1, "steps": 2, "warmup": 0} | config
    workload = CopyComputeWorkload(default_config("copy_compute", **small))
    workload.setup()
    try:
        return workload.run()
    finally:
        workload.cleanup()


@pytest.mark.parametrize(
    ("variant", "order"),
    [("overlapped", ["copy", "copy", "compute", "wait", "wait"]), ("serial", ["compute", "copy", "copy"])],
)
def test_copies_start_before_the_products_and_are_waited_for_behind_them(variant, order):
    events = []
    work = SimpleNamespace(wait=lambda: events.append("wait"))
    copies = [SimpleNamespace(transfer=lambda _: events.append("copy"))] * 2
    streams = [SimpleNamespace(submit=lambda transfer: transfer(False) or work)] * 2
    make_variants(lambda: events.append("compute"), copies, streams)[variant]()
    assert events == order


def test_profiled_steps_add_no_metric_of_communication(tmp_path, monkeypatch):
    result = launched(tmp_path, monkeypatch, profile_steps=2)
    assert len(result.profile.steps) == 2
    assert result.profile.kernels
    assert not {"overlap_ratio", "exposed_comm_ms"} & set(result.metrics)


def test_times_of_the_other_variants_are_no_steps_on_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(StepTimer, "collective_ms", lambda timer: [0.0] * len(timer.step_times_ms()))
    folder = as_rank_of(make_plan(tmp_path / "run"), monkeypatch)
    result = launched(tmp_path, monkeypatch, profile_steps=0)
    assert (len(result.step_times_ms), result.collective_ms) == (2, [])
    assert steps_entered(folder) == 2


def test_launch_without_profiled_steps_leaves_the_trace_that_is_asked_for(tmp_path, monkeypatch):
    folder = as_rank_of(make_plan(tmp_path / "run", profiler="torch"), monkeypatch)
    assert launched(tmp_path, monkeypatch, profile_steps=0).profile.steps == []
    assert (folder / "trace.json.gz").exists()
