"""Values that ranks record beside step times, on CPU: waits, memory and a planted delay."""

import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pytest_aorta.common import variables
from pytest_aorta.result.folder import ARRIVALS_FILE
from pytest_aorta.result.trace.rank_files import read_arrivals
from pytest_aorta.worker import Delay, StepTimer, collectives
from pytest_aorta.worker import steps as timer_module
from pytest_aorta.worker.collectives import calls_by_step, recorded_collectives, waits_of_steps_ms
from pytest_aorta.worker.steps import MEMORY_EVERY_CPU_STEPS
from tests.unit.builders import each_of

CPU = torch.device("cpu")
KEPT_BYTES = 4 << 20
MS = 1_000_000
# Three steps of 100 ms.
BEGAN_NS, ENDED_NS = [100 * MS, 200 * MS, 300 * MS], [200 * MS, 300 * MS, 400 * MS]


def at(created_ms: float, duration_ms: float | None = 1.0) -> dict:
    """Return an entry of NCCL's flight recorder."""
    return {"time_created_ns": int(created_ms * MS), "duration_ms": duration_ms, "retired": True}


def timed(compute_ms: float, steps: int = 3) -> StepTimer:
    timer, compute = StepTimer(CPU), Delay(CPU, compute_ms)
    for _ in range(steps):
        with timer.step():
            compute()
    return timer


def test_every_step_has_a_time():
    times_ms = timed(5).step_times_ms()
    assert len(times_ms) == 3
    assert all(step_ms >= 5 for step_ms in times_ms)


def test_time_without_work_and_without_a_collective_is_no_wait(tmp_path, monkeypatch):
    monkeypatch.setenv(variables.RANK_FOLDER, str(tmp_path))
    timer = StepTimer(CPU)
    with timer.step():
        time.sleep(0.01)
    assert timer.collective_ms() == []
    arrivals = read_arrivals(tmp_path / ARRIVALS_FILE)
    assert [end - begin >= 10 * MS for begin, end in zip(arrivals.began_ns, arrivals.ended_ns, strict=True)] == [True]


def test_steps_that_raise_and_are_caught_add_neither_times_nor_samples_of_memory():
    timer = StepTimer(CPU)
    for number in range(MEMORY_EVERY_CPU_STEPS + 1):
        for lost in (True, False):
            with suppress(RuntimeError), timer.step():
                if lost:
                    raise RuntimeError(number)
    assert len(timer.step_times_ms()) == MEMORY_EVERY_CPU_STEPS + 1
    assert len(timer.memory_bytes()) == 2


@pytest.mark.parametrize(("steps", "every"), [(1, 3), (3, 3), (4, 3), (39, 3), (40, 6), (41, 6), (1000, 96)])
def test_memory_is_read_before_fewer_than_14_evenly_spaced_steps(monkeypatch, steps, every):
    timer = StepTimer(CPU)
    monkeypatch.setattr(timer_module, "memory_in_use", lambda _: timer.num_steps)
    for _ in range(steps):
        with timer.step():
            pass
    assert timer.memory_bytes() == [*range(0, steps, every)]


@pytest.mark.parametrize("kind", ["tensor", "file"])
def test_memory_that_a_step_keeps_is_seen_to_be_in_use_or_resident(kind):
    timer, kept = StepTimer(CPU), []
    for _ in range(MEMORY_EVERY_CPU_STEPS + 1):
        with timer.step():
            if kind == "tensor":
                kept.append(torch.empty(KEPT_BYTES, dtype=torch.uint8))
            else:  # no allocator knows of it
                kept.append(mmap.mmap(-1, KEPT_BYTES))
                kept[-1].write(bytes(KEPT_BYTES))
    first, second = timer.memory_bytes() if kind == "tensor" else timer.resident_bytes()
    assert second - first > 0.8 * MEMORY_EVERY_CPU_STEPS * KEPT_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="another kernel does not tell how long a thread has waited")
def test_a_rank_that_computes_waits_for_a_busy_cpu_and_one_that_sleeps_does_not():
    allowed = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    waits = []
    try:
        for process in (0, busy.pid):
            os.sched_setaffinity(process, {min(allowed)})
        for work in (Delay(CPU, 20), partial(time.sleep, 0.02)):
            timer = StepTimer(CPU)
            for _ in range(9):
                with timer.step():
                    work()
            waits.append(timer.cpu_wait())
    finally:
        os.sched_setaffinity(0, allowed)
        busy.kill()
        busy.wait()
    computes, sleeps = waits
    # What the other process waits for is a part of both, since it may prepare batches.
    assert computes > max(0.5, sleeps)


def test_waits_for_a_cpu_are_not_known_of_one_step():
    assert timed(1, steps=1).cpu_wait() is None


def part(created_ms: float) -> dict:
    """Return an entry of a send in a batch, which the recorder never completes."""
    name = {"profiling_name": "nccl:send 0->1", "is_p2p": True}
    return {"time_created_ns": int(created_ms * MS), "retired": False} | name


BATCH = at(111, 2.0) | {"profiling_name": "nccl:coalesced", "is_p2p": True}


@pytest.mark.parametrize(
    ("entries", "waits_ms"),
    [
        pytest.param([at(50), at(110, 2.0), at(190, 3.0), at(210, 4.0), at(310, 5.0)], [5.0, 4.0, 5.0], id="summed"),
        pytest.param([at(50), at(310)], [0.0, 0.0, 1.0], id="steps without a collective"),
        pytest.param([at(310, 5.0), at(50), at(210, 4.0), at(110, 2.0)], [2.0, 4.0, 5.0], id="another order"),
        # A short record may hold its first step in part.
        pytest.param([at(150), at(210, 4.0), at(310, 5.0)], [4.0, 5.0], id="record of two steps"),
        pytest.param([at(210, 4.0), at(310, 5.0)], [5.0], id="record of one step"),
        pytest.param([at(310, 5.0)], [], id="record of a part"),
        pytest.param([at(50), at(310, 5.0), at(401, 99.0)], [0.0, 0.0, 5.0], id="after the last step"),
        pytest.param([at(50), at(110, 2.0), at(310, None)], [], id="unknown duration"),
        pytest.param([at(50, None), at(110, 2.0)], [2.0, 0.0, 0.0], id="unknown duration before the steps"),
        pytest.param([at(50), part(110), part(110), BATCH, at(310, 5.0)], [2.0, 0.0, 5.0], id="batch of sends"),
        pytest.param([at(50), part(110), at(310, 5.0)], [], id="send without a batch"),
        pytest.param([], [], id="no record"),
    ],
)
def test_waits_are_summed_by_the_step_they_began_in(entries, waits_ms):
    assert waits_of_steps_ms(entries, BEGAN_NS, ENDED_NS) == waits_ms


def test_collectives_between_steps_are_part_of_none():
    """Reduce the loss for a log, or hash weights, after a step has ended."""
    entries = [at(50), at(110, 2.0), at(170, 99.0), at(199, None), at(310, 5.0)]
    assert waits_of_steps_ms(entries, BEGAN_NS, [160 * MS, 260 * MS, 400 * MS]) == [2.0, 0.0, 5.0]
    assert waits_of_steps_ms(entries, [], ENDED_NS) == []


def num_waits(task: Callable[[], object]) -> int:
    """Return how often this thread gave up its processor during ``task``, as it does in a sleep."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    task()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


@each_of(
    "first, later, calls",
    {
        "a collective": (0, [part(110), at(120) | {"is_p2p": False}], 0.5),
        "messages of a full record": (7, [part(110), part(220)], 0.0),
        "messages before the steps": (7, [part(90)], 0.0),
    },
)
def test_messages_are_no_collectives_of_a_step(monkeypatch, first, later, calls):
    record = [entry | {"record_id": number} for number, entry in enumerate(later, first)]
    monkeypatch.setattr(collectives, "flight_records", lambda kind: record if kind == "nccl" else None)
    spans = [(100 * MS, 200 * MS), (200 * MS, 300 * MS)]
    assert calls_by_step(spans) == calls


def test_record_is_not_waited_for_because_of_parts_of_a_batch(monkeypatch):
    dumped = json.dumps({"entries": [part(110), BATCH]})
    found = SimpleNamespace(_dump_nccl_trace_json=lambda **_: dumped)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", found)
    assert len(recorded_collectives()) == 2
    assert min(num_waits(recorded_collectives) for _ in range(5)) == 0


def test_process_without_nccl_has_no_record():
    assert recorded_collectives() == []


def test_delay_works_and_does_not_wait():
    assert num_waits(partial(time.sleep, 0.001)) > 0
    # Another thread of this process may ask for the interpreter, but not during each delay.
    assert min(num_waits(Delay(CPU, 30)) for _ in range(5)) == 0


def test_steps_of_microseconds_are_timed():
    timer = StepTimer(torch.device("cpu"))
    for _ in range(20_000):
        with timer.step():
            pass
    times_ms = timer.step_times_ms()
    assert len(times_ms) == 20_000
    assert all(time_ms > 0 for time_ms in times_ms)
    assert sorted(times_ms)[10_000] < 0.05
