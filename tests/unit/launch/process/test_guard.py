"""The real guard, with tiny programs in place of the torchrun agent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.launch.guarded import GUARD, guard_spec
from pytest_aorta.result.outcome import EndReason
from tests.distributed.processes import is_alive
from tests.unit.builders import each_of, make_plan, write

# Only a guard that hangs reaches this limit.
HANG_S = 60.0
# Time limits of launches: the first suffices on idle cores; on busy cores, a launch is repeated with the next.
TIME_LIMITS_S = (0.3, 3.0, 30.0)
# Each program first writes its process id, and `fork()` starts a process that does the same.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
RUN_DIR = Path({run_dir!r})
def leave_pid():
    (RUN_DIR / f"pid-{{os.getpid()}}").touch()
def rank_file(rank, name, text=""):
    (RUN_DIR / "ranks" / str(rank) / name).write_text(text)
def fork():
    pid = os.fork()
    if pid == 0:
        leave_pid()
    return pid
def wait_for_the_time_limit():
    (RUN_DIR / "waits").touch()
    time.sleep(60)
leave_pid()
"""


class Watched:
    """A running guard with its two pipes."""

    def __init__(self, run_dir: Path, program: str, **changes: Any) -> None:
        for rank in ("0", "1"):
            (run_dir / "ranks" / rank).mkdir(parents=True)
        self.run_dir = run_dir
        self.time_limit_s: float = changes.get("time_limit_s", HANG_S)
        lifeline_end, self.lifeline = os.pipe()
        self.verdict, verdict_end = os.pipe()
        code = PRELUDE.format(run_dir=str(run_dir)) + program
        argv = [sys.executable, "-I", "-S", "-c", code]
        file = str(changes.pop("file", GUARD))
        spec = guard_spec(make_plan(run_dir), lifeline_end, verdict_end)
        spec |= {"argv": argv, "time_limit_s": self.time_limit_s}
        with (run_dir / "agent.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", file, json.dumps(spec | changes)],
                stdout=log,
                stderr=log,
                pass_fds=(lifeline_end, verdict_end),
                start_new_session=True,
            )
        os.close(lifeline_end)
        os.close(verdict_end)

    def close_lifeline(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def end(self) -> dict[str, Any]:
        """Return the verdict when the guard has exited, and check that no process is left."""
        assert self.process.wait(2 * HANG_S) == 0, (self.run_dir / "agent.log").read_text()
        assert [pid for pid in self.pids() if is_alive(pid)] == []
        verdict: dict[str, Any] = json.loads(os.read(self.verdict, 65536))
        assert verdict["survivors"] == []
        return verdict

    def pids(self) -> list[int]:
        found = [int(path.name.removeprefix("pid-")) for path in self.run_dir.glob("pid-*")]
        assert found
        return found

    def wait_for(self, *names: str) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not all(list(self.run_dir.glob(name)) for name in names):
            assert time.monotonic() < deadline_s, f"no {names}"
            time.sleep(0.01)

    def clean_up(self) -> None:
        self.close_lifeline()
        try:
            self.process.wait(HANG_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.verdict)


@pytest.fixture
def guard(tmp_path) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def start(program: str, **changes: Any) -> Watched:
        started.append(Watched(tmp_path / str(len(started)), program, **changes))
        return started[-1]

    yield start
    for watched in started:
        watched.clean_up()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the guard that waits for torchrun's report of an ended rank for half a second instead of five."""
    text = GUARD.read_text(encoding="utf-8")
    assert "\nGONE_S = 5.0\n" in text
    file = tmp_path_factory.mktemp("guard") / "guard.py"
    write(file, text.replace("\nGONE_S = 5.0\n", "\nGONE_S = 0.5\n"))
    return file


@pytest.fixture
def guard_until_the_limit(guard: Callable[..., Watched]) -> Callable[..., Watched]:
    """Run a program that waits for the time limit; return the first launch in which it waited when the limit came."""

    def run(program: str, **changes: Any) -> Watched:
        for limit_s in TIME_LIMITS_S:
            watched = guard(f"{program}\nwait_for_the_time_limit()", time_limit_s=limit_s, **changes)
            watched.process.wait(2 * HANG_S)
            if (watched.run_dir / "waits").exists():
                break
        return watched

    return run


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_of_the_agent_is_reported(guard, code):
    verdict = guard(f"sys.exit({code})").end()
    assert (verdict["reason"], verdict["agent_status"], verdict["stopped"]) == (EndReason.EXIT, code, [])
    assert 0 < verdict["wall_s"] < HANG_S / 2


GONE = "pid = fork()\nif pid == 0: os._exit(%d)\nrank_file(1, 'pid', str(pid))\nos.wait()\n"
PATIENT = {"time_limit_s": 2.0, "error_grace_s": 50, "straggler_s": 50}
# The program, what differs in the launch, and the reason of its end.
ENDS: dict[str, tuple[str, dict[str, float], EndReason]] = {
    "rank without a result": (GONE % 0, {}, EndReason.RANK_GONE),
    "rank with a result": (f"rank_file(1, 'result.json', '{{}}')\n{GONE % 0}", PATIENT, EndReason.TIME_LIMIT),
    "rank with an error": (f"rank_file(1, 'error.json', '{{}}')\n{GONE % 0}", PATIENT, EndReason.TIME_LIMIT),
    "rank that torchrun has noticed": (
        f"{GONE % 3}print('Sending process 7 closing signal SIGTERM', flush=True)",
        {"time_limit_s": 2.0},
        EndReason.TIME_LIMIT,
    ),
    "error and a grace period": ("rank_file(1, 'error.json')", {"error_grace_s": 0.3}, EndReason.RANK_ERROR),
    "straggler": ("rank_file(1, 'result.json')", {"straggler_s": 0.3}, EndReason.STRAGGLER),
}


@each_of("program, changes, reason", ENDS)
def test_launch_ends_by_what_its_ranks_leave(guard, impatient, program, changes, reason):
    verdict = guard(f"{program}\ntime.sleep(60)", file=impatient, **{"time_limit_s": 50.0} | changes).end()
    assert verdict["reason"] == reason
    assert 0.3 <= verdict["wall_s"] < HANG_S / 2


def test_fifos_of_a_rank_do_not_block_the_guard(guard_until_the_limit):
    program = "for name in ('pid', 'error.json'): os.mkfifo(RUN_DIR / 'ranks' / '1' / name)"
    verdict = guard_until_the_limit(program).end()
    assert verdict["reason"] == EndReason.TIME_LIMIT


def test_agent_that_ignores_sigterm_is_killed(guard_until_the_limit):
    watched = guard_until_the_limit("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nfork()")
    verdict = watched.end()
    assert (verdict["reason"], verdict["agent_status"]) == (EndReason.TIME_LIMIT, -signal.SIGKILL)
    assert len(verdict["stopped"]) == 2
    assert verdict["wall_s"] < watched.time_limit_s + HANG_S / 4


def test_daemonized_grandchild_is_gone_when_the_agent_has_exited(guard):
    program = """
if fork() == 0:
    os.setsid()
    if fork() > 0:
        os._exit(0)
    rank_file(0, "daemon")
    time.sleep(60)
    os._exit(0)
while not (RUN_DIR / "ranks/0/daemon").exists():
    time.sleep(0.01)
"""
    watched = guard(program)
    verdict = watched.end()
    assert (verdict["reason"], verdict["agent_status"]) == (EndReason.EXIT, 0)
    assert len(watched.pids()) == 3
    assert len(verdict["stopped"]) == 1
    assert verdict["wall_s"] < HANG_S / 2


def test_guard_that_is_killed_as_the_agent_ends_leaves_no_process(guard):
    program = "if fork() == 0: os.setsid(); time.sleep(600)\nwhile not (RUN_DIR / 'go').exists(): time.sleep(0.01)"
    watched = guard(program)
    watched.wait_for("pid-*")
    while len(watched.pids()) < 2:
        time.sleep(0.01)
    os.kill(watched.process.pid, signal.SIGSTOP)
    (watched.run_dir / "go").touch()
    time.sleep(0.5)
    watched.process.kill()
    deadline_s = time.monotonic() + HANG_S / 4
    while (left := [pid for pid in watched.pids() if is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_byte_in_the_lifeline_makes_ranks_write_stacks_before_they_end(guard):
    program = """
signal.signal(signal.SIGUSR1, lambda *_: rank_file(0, "stacks.txt", "here"))
rank_file(0, "pid", str(os.getpid()))
if os.fork() == 0:
    rank_file(0, "pid", str(os.getpid()))
    (RUN_DIR / "ranks/0/ready").touch()
time.sleep(60)
"""
    watched = guard(program)
    watched.wait_for("ranks/0/ready")
    os.write(watched.lifeline, b".")
    assert watched.end()["reason"] == EndReason.STOPPED
    assert (watched.run_dir / "ranks/0/stacks.txt").read_text() == "here"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_guard_outlives_the_signals_of_a_terminal(guard, number):
    watched = guard("rank_file(0, 'ready')\ntime.sleep(0.5)\nsys.exit(5)")
    watched.wait_for("ranks/0/ready")
    watched.process.send_signal(number)
    assert watched.end()["agent_status"] == 5


def test_agent_that_ends_within_the_grace_period_reports_its_own_exit_code(guard):
    verdict = guard("rank_file(1, 'error.json')\ntime.sleep(0.2)\nsys.exit(1)", error_grace_s=10.0).end()
    assert (verdict["reason"], verdict["agent_status"]) == (EndReason.EXIT, 1)


def test_process_outside_the_launch_gets_no_signal(guard_until_the_limit):
    stranger = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    try:
        guard_until_the_limit(f"rank_file(1, 'pid', '{stranger.pid}')").end()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
