"""Runs a plan: the guard, under it the agent, under it the ranks. Returns when none of them is left.

The guard is a program of its own with torchrun under it, or, in a warm launch, forked off the fork server (warm.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from pytest_aorta.errors import LaunchError
from pytest_aorta.files import write_json
from pytest_aorta.phases import phases_s
from pytest_aorta.plan import FORKSERVER, TORCHRUN, LaunchPlan, agent_command, launch_environment, rank_document

GUARD = Path(__file__).parent / "process" / "guard.py"
# The guard's own stop sequence is bounded by stacks, SIGTERM and SIGKILL: 0.5 + 2 + 10 seconds.
STOP_S = 20.0


@dataclass(frozen=True)
class LaunchOutcome:
    """How a launch ended, as the guard saw it.

    Attributes:
        reason: exit, time_limit, rank_error, straggler, output_cap, parent_gone, or guard_lost.
        agent_status: the agent's exit code, negative for a signal, None where it was killed at the end.
        stopped: processes that were still there when the reason came up, and were ended.
        survivors: processes that could not be ended.
        wall_s: from the agent's start to the last process's end.
        launcher: what started the ranks, torchrun or forkserver.
        phases_s: parts of wall_s, as far as the ranks came: start, import, init, run, leave; of a script start, leave.
    """

    reason: str
    agent_status: int | None
    stopped: tuple[int, ...]
    survivors: tuple[int, ...]
    wall_s: float
    launcher: str = TORCHRUN
    phases_s: dict[str, float] = field(default_factory=dict)


class GuardProcess(Protocol):
    """What a launch needs of its guard, as ``subprocess.Popen`` has it."""

    def wait(self, timeout: float | None = None) -> object:
        """Return once it has exited; raises ``subprocess.TimeoutExpired``."""

    def kill(self) -> None:
        """Send SIGKILL."""


class GuardStarter(Protocol):
    """Starts the guard of a plan with its ends of the lifeline and the verdict's pipe."""

    def __call__(self, plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int) -> GuardProcess:
        """Raises OSError where it can't."""


def launch(
    plan: LaunchPlan, environ: Mapping[str, str] = os.environ, forkserver: GuardStarter | None = None
) -> LaunchOutcome:
    """Run ``plan`` and wait until every process of it is gone, also when interrupted.

    Without a ``forkserver`` to fork the guard off, the launch is torchrun's, whatever the plan asks for.

    Raises:
        LaunchError: the run folder can't be written or the guard can't be started.
    """
    try:
        prepare_folder(plan)
    except OSError as error:
        raise LaunchError(f"results folder {plan.run_dir} can't be written: {error.strerror or error}") from None
    with ExitStack() as pipes:
        lifeline_end, lifeline = _pipe(pipes)
        verdict, verdict_end = _pipe(pipes)
        try:
            start_guard = forkserver or _start_guard
            guard = start_guard(plan, environ, lifeline_end.fileno(), verdict_end.fileno())
        except OSError as error:
            raise LaunchError(f"the guard can't be started in {plan.cwd}: {error.strerror or error}") from None
        lifeline_end.close()
        verdict_end.close()
        try:
            text = _read_until(verdict, time.monotonic() + plan.timeout_s + STOP_S)
        finally:
            # Tells the guard, where it still runs, to end everything, which is over when it exits.
            lifeline.close()
            _wait_bounded(guard)
    outcome = replace(_outcome(plan, text), launcher=FORKSERVER if forkserver else TORCHRUN)
    with suppress(OSError):  # the verdict is here; a disk that has filled up since must not hide it
        write_json(plan.run_dir / "outcome.json", asdict(outcome))
    return outcome


def prepare_folder(plan: LaunchPlan) -> None:
    """Create the run folder with one folder a rank, and write the plan."""
    for folder in rank_folders(plan):
        folder.mkdir(parents=True)
    if plan.world.device == "cuda":
        (plan.run_dir / "flight").mkdir()
    write_json(plan.run_dir / "plan.json", rank_document(plan))


def launch_times_s(outcome: LaunchOutcome) -> dict[str, float]:
    """``wall`` and its parts."""
    return {"wall": outcome.wall_s, **outcome.phases_s}


def rank_folders(plan: LaunchPlan) -> list[Path]:
    """One folder a rank, in order of rank."""
    return [plan.run_dir / "ranks" / str(rank) for rank in range(plan.world.size)]


def guard_spec(plan: LaunchPlan, lifeline_fd: int, verdict_fd: int) -> dict[str, Any]:
    """What the guard is told."""
    return {
        "argv": agent_command(plan),
        "run_dir": str(plan.run_dir),
        "world_size": plan.world.size,
        "time_limit_s": plan.timeout_s,
        **asdict(plan.limits),
        # Beside this Python too: a virtual environment need not be on the path.
        "py_spy": shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent)),
        "lifeline_fd": lifeline_fd,
        "verdict_fd": verdict_fd,
    }


def _start_guard(
    plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
) -> subprocess.Popen[bytes]:
    spec = json.dumps(guard_spec(plan, lifeline_fd, verdict_fd))
    with (plan.run_dir / "agent.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), spec],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=plan.cwd,
            env=launch_environment(plan, environ),
            pass_fds=(lifeline_fd, verdict_fd, *plan.lease_fds),
            # A Ctrl-C in the terminal reaches pytest alone, which then says through the lifeline what to do.
            start_new_session=True,
        )


def _outcome(plan: LaunchPlan, text: bytes) -> LaunchOutcome:
    if not text:
        return LaunchOutcome("guard_lost", None, (), (), 0.0)
    verdict = json.loads(text)
    began_s, wall_s = verdict["began_ns"] / 1e9, verdict["wall_s"]
    return LaunchOutcome(
        reason=verdict["reason"],
        agent_status=verdict["agent_status"],
        stopped=tuple(verdict["stopped"]),
        survivors=tuple(verdict["survivors"]),
        wall_s=wall_s,
        phases_s=phases_s(rank_folders(plan), began_s, began_s + wall_s),
    )


def _read_until(pipe: IO[bytes], deadline_s: float) -> bytes:
    """Read to the end of the pipe; the guard closes it by exiting."""
    chunks = []
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([pipe], [], [], left_s)[0]:
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                break
            chunks.append(chunk)
    return b"".join(chunks)


def _wait_bounded(guard: GuardProcess) -> None:
    try:
        guard.wait(STOP_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = (
        stack.enter_context(_no_standard_stream(fd, mode)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
    )
    return reader, writer


def _no_standard_stream(fd: int, mode: str) -> IO[bytes]:
    # Where pytest's stdin is closed, a pipe can get its number, which the guard's own stdin then takes away.
    if fd <= 2:
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    return os.fdopen(fd, mode, buffering=0)
