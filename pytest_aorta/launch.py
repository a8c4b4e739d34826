"""Runs a plan: the guard, under it torchrun's agent, under it the ranks. Returns when none of them is left."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pytest_aorta.errors import LaunchError
from pytest_aorta.files import write_json
from pytest_aorta.plan import LaunchPlan, agent_command, launch_environment, rank_document

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
    """

    reason: str
    agent_status: int | None
    stopped: tuple[int, ...]
    survivors: tuple[int, ...]
    wall_s: float


def launch(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> LaunchOutcome:
    """Run ``plan`` and wait until every process of it is gone, also when interrupted.

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
            guard = _start_guard(plan, environ, lifeline_end.fileno(), verdict_end.fileno())
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
    outcome = _outcome(text)
    write_json(plan.run_dir / "outcome.json", asdict(outcome))
    return outcome


def prepare_folder(plan: LaunchPlan) -> None:
    """Create the run folder with one folder a rank, and write the plan."""
    for rank in range(plan.world.size):
        (plan.run_dir / "ranks" / str(rank)).mkdir(parents=True)
    write_json(plan.run_dir / "plan.json", rank_document(plan))


def guard_spec(plan: LaunchPlan, lifeline_fd: int, verdict_fd: int) -> dict[str, Any]:
    """What the guard is told."""
    return {
        "argv": agent_command(plan),
        "run_dir": str(plan.run_dir),
        "world_size": plan.world.size,
        "time_limit_s": plan.timeout_s,
        **asdict(plan.limits),
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
            pass_fds=(lifeline_fd, verdict_fd),
            # A Ctrl-C in the terminal reaches pytest alone, which then says through the lifeline what to do.
            start_new_session=True,
        )


def _outcome(text: bytes) -> LaunchOutcome:
    if not text:
        return LaunchOutcome("guard_lost", None, (), (), 0.0)
    verdict = json.loads(text)
    return LaunchOutcome(
        reason=verdict["reason"],
        agent_status=verdict["agent_status"],
        stopped=tuple(verdict["stopped"]),
        survivors=tuple(verdict["survivors"]),
        wall_s=verdict["wall_s"],
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


def _wait_bounded(guard: subprocess.Popen[bytes]) -> None:
    try:
        guard.wait(STOP_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read_fd, write_fd = os.pipe()
    reader = stack.enter_context(os.fdopen(read_fd, "rb", buffering=0))
    return reader, stack.enter_context(os.fdopen(write_fd, "wb", buffering=0))
