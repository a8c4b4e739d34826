"""Waiting for open files, also in a process that has more of them than ``select`` accepts."""

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.result.outcome import EndReason
from tests.unit.builders import make_plan

# FD_SETSIZE, from which on select refuses file descriptors.
SELECT_LIMIT = 1024
VERDICT = '{"reason": "exit", "agent_status": 0, "stopped": [], "survivors": [], "wall_s": 1.0}'


@pytest.fixture
def _crowd() -> Iterator[None]:
    """Give every file that the test opens a descriptor that ``select`` refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * SELECT_LIMIT:
        pytest.skip(f"this user may have only {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SELECT_LIMIT), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        fd = 0
        while fd < SELECT_LIMIT:
            fd = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, fd)
        yield


def verdict_of(command: list[str], *fds: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, pass_fds=fds, stdout=fds[-1])


@pytest.mark.usefixtures("_crowd")
def test_launch_ends_in_a_process_with_many_open_files(tmp_path):
    with GuardedLaunch(
        make_plan(tmp_path / "run"), {}, lambda _p, _e, *fds: verdict_of(["echo", VERDICT], *fds)
    ) as ran:
        assert ran.fileno() >= SELECT_LIMIT
        ran.wait()
    assert ran.outcome().reason == EndReason.EXIT


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
