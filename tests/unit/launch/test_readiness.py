"""Waiting for open files, also in a process that has more of them than ``select`` accepts."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pytest_aorta.common import variables
from pytest_aorta.launch.guarded import ForkedGuard, GuardedLaunch
from pytest_aorta.launch.process.forkserver import _answer_of_child
from pytest_aorta.launch.sweep import end_processes, launch_ids
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.result.outcome import EndReason
from tests.unit.builders import make_plan

# FD_SETSIZE, from which on select refuses file descriptors.
SELECT_LIMIT = 1024
VERDICT = '{"reason": "exit", "agent_status": 0, "stopped": [], "survivors": [], "wall_s": 1.0}'
GUARD_OF_TORCHRUN = """
import os, subprocess, time
from pytest_aorta.launch.process.torchrun import _die_with_guard
while os.open(os.devnull, os.O_RDONLY) < 1024:
    pass
guard = subprocess.Popen(["sleep", "60"])
_die_with_guard(guard.pid)
guard.kill()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Allow more open files than ``select`` accepts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * SELECT_LIMIT:
        pytest.skip(f"this user may have only {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SELECT_LIMIT), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def _crowd(limit: None) -> Iterator[None]:
    """Give every file that the test opens a descriptor that ``select`` refuses."""
    with ExitStack() as stack:
        fd = 0
        while fd < SELECT_LIMIT:
            fd = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, fd)
        yield


crowded = pytest.mark.usefixtures("_crowd")


def verdict_of(command: list[str], *fds: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, pass_fds=fds, stdout=fds[-1])


@crowded
def test_launch_ends_in_a_process_with_many_open_files(tmp_path):
    with GuardedLaunch(
        make_plan(tmp_path / "run"), {}, lambda _p, _e, *fds: verdict_of(["echo", VERDICT], *fds)
    ) as ran:
        assert ran.fileno() >= SELECT_LIMIT
        ran.wait()
    assert ran.outcome().reason == EndReason.EXIT


@crowded
def test_forked_guard_is_awaited_in_a_process_with_many_open_files():
    with subprocess.Popen(["sleep", "60"]) as process:
        guard = ForkedGuard(process.pid, os.pidfd_open(process.pid))
        with pytest.raises(subprocess.TimeoutExpired):
            guard.wait(0.01)
        guard.kill()
        guard.wait(10)


@crowded
def test_processes_of_a_lost_guard_are_ended_in_a_process_with_many_open_files(tmp_path):
    with subprocess.Popen(["sleep", "60"], env={variables.LAUNCH_ID: launch_ids(tmp_path, {})}) as process:
        assert end_processes([tmp_path]) == ((process.pid,), ())


@crowded
def test_forked_child_is_asked_in_a_process_with_many_open_files():
    assert _answer_of_child(lambda: "yes", 30).effect == "yes"


def test_program_of_torchrun_ends_with_its_guard_when_it_has_many_open_files():
    assert subprocess.run([sys.executable, "-c", GUARD_OF_TORCHRUN], check=False, timeout=50).returncode == 1


def test_signal_does_not_end_a_wait():
    caught = list[int]()
    before = signal.signal(signal.SIGALRM, lambda number, _: caught.append(number))
    near, far = socket.socketpair()
    try:
        with near, far:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            assert not is_readable(near, 0.3)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught == [signal.SIGALRM]
