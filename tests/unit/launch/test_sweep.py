"""Processes of a launch whose guard is gone, with small programs in place of ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch import sweep
from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.leases import holders, lease, record_end, record_launch
from pytest_aorta.launch.sweep import end_processes, is_stopped, launch_ids, processes_of, unmarked
from tests.unit.builders import make_plan, replace

Starter = Callable[..., subprocess.Popen[bytes]]
# Writes a line after it has marked itself.
MARKS_ITSELF = """
import sys, time
from pytest_aorta.launch.sweep import mark_this_process
mark_this_process(sys.argv[1])
print("marked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Starter]:
    """Provide a starter of programs, which are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def starter(*command: str, ids: str = "", **options: object) -> subprocess.Popen[bytes]:
        given = {"env": dict(os.environ) | {variables.LAUNCH_ID: ids}} | options
        started.append(subprocess.Popen(command or ("sleep", "60"), **given))  # type: ignore[call-overload]
        # A process that is just starting a program shows no environment and no arguments for a moment.
        while started[-1].poll() is None and not Path(f"/proc/{started[-1].pid}/cmdline").read_bytes():
            time.sleep(0.001)
        return started[-1]

    yield starter
    for process in started:
        process.kill()
        process.communicate()


def test_only_processes_of_the_launch_are_ended_also_stopped_ones(tmp_path, start):
    mine, other = tmp_path / "mine", tmp_path / "other"
    running, stopped = (start(ids=launch_ids(mine, {})) for _ in range(2))
    stopped.send_signal(signal.SIGSTOP)
    stranger = start(ids=launch_ids(other, {}))
    assert sorted(processes_of([mine])) == sorted([running.pid, stopped.pid])
    assert end_processes([mine]) == (tuple(sorted([running.pid, stopped.pid])), ())
    assert (running.wait(), stopped.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert stranger.poll() is None


def test_process_that_shows_no_environment_while_it_starts_a_program_is_ended(tmp_path, start, monkeypatch):
    process = start(ids=launch_ids(tmp_path, {}))
    first_pass = iter([[]])
    monkeypatch.setattr(sweep, "processes_of", lambda folders: next(first_pass, processes_of(folders)))
    assert end_processes([tmp_path]) == ((process.pid,), ())


def test_launch_inside_a_launch_belongs_to_both(tmp_path, start):
    outer = {variables.LAUNCH_ID: launch_ids(tmp_path / "outer", {})}
    inner = start(ids=launch_ids(tmp_path / "inner", outer))
    assert processes_of([tmp_path / "outer"]) == processes_of([tmp_path / "inner"]) == [inner.pid]


def test_forked_guard_marks_itself_in_place(tmp_path, start):
    ids = launch_ids(tmp_path, {})
    program = start(sys.executable, "-c", MARKS_ITSELF, ids, ids=unmarked(ids), stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"marked\n"
    assert processes_of([tmp_path]) == [program.pid]


@pytest.mark.parametrize(("name", "is_found"), [("ranks/0/output.log", True), ("agent.log", True), ("mine.txt", False)])
def test_program_without_environment_is_found_by_the_log_it_writes(tmp_path, start, name, is_found):
    (tmp_path / "ranks" / "0").mkdir(parents=True)
    with (tmp_path / name).open("wb") as log:
        writer = start("/bin/sleep", "60", env={}, stdout=log)
    assert processes_of([tmp_path]) == ([writer.pid] if is_found else [])


def test_program_that_only_reads_a_log_is_not_found(tmp_path, start):
    (tmp_path / "agent.log").write_text("line\n")
    reader = start("tail", "-f", str(tmp_path / "agent.log"), stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"line\n"
    assert processes_of([tmp_path]) == []


def test_stopped_process_is_recognized(start):
    process = start()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert is_stopped(process.pid)
    assert not is_stopped(os.getpid())


def take(folder: Path, owner: str, wait_s: float = 10.0):
    return lease(("cpu-0",), 1, exclusive=False, wait_s=wait_s, folder=folder, owner=owner)


def test_device_with_a_process_that_could_not_be_ended_is_leased_when_it_has_ended(tmp_path, start, monkeypatch):
    monkeypatch.setattr("pytest_aorta.launch.leases.end_processes", lambda _launches: None)
    leases, plan = tmp_path / "leases", make_plan(tmp_path / "run")
    left = start(ids=launch_ids(plan.run_dir, {}))
    verdict = f'{{"reason": "exit", "agent_status": 0, "stopped": [], "survivors": [{left.pid}], "wall_s": 1.0}}'

    def report(_plan: object, _environ: object, *fds: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["echo", verdict], pass_fds=fds, stdout=fds[-1])

    with take(leases, "first") as held:
        with GuardedLaunch(replace(plan, lease_fds=held.fds), {}, report) as ran:
            ran.wait()
        assert ran.outcome().survivors == (left.pid,)
    with pytest.raises(LeaseError, match="cpu-0 held by first"):
        take(leases, "second", wait_s=0.1)
    left.kill()
    left.wait()
    take(leases, "second", wait_s=5.0).release()


def test_launch_that_has_ended_is_not_looked_for(tmp_path, start):
    leases, run_dir = tmp_path / "leases", tmp_path / "run"
    left = start(ids=launch_ids(run_dir, {}))
    with take(leases, "first") as held:
        record_launch(held.fds, run_dir)
        record_end(held.fds, run_dir)
    assert holders(leases) == []
    with take(leases, "second"):
        assert left.poll() is None
