"""Launches with a profiler around torchrun: its traces are kept, and none of its processes is ever left."""

import os
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_aorta.launch.guarded import launch
from pytest_aorta.plan.launch_plan import LaunchPlan, limits_under
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result
from tests.distributed.processes import START_S, await_true, mentioning
from tests.distributed.test_faults import make_plan

# Like a real profiler, it starts a child, writes after the child's normal end, and exits with the child's exit code.
FAKE_PROFILER = """#!/bin/sh
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do
  case "$1" in --output=*) trace="${1#--output=}.nsys-rep";; esac
  shift
done
"$@"
status=$?
echo "exited with $status" > "$trace"
exit $status
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Provide the caller's environment with a fake ``nsys`` on PATH."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(FAKE_PROFILER, encoding="utf-8")
    program.chmod(0o755)
    return dict(os.environ) | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def wrapped(tmp_path: Path, kind: str) -> LaunchPlan:
    return replace(make_plan(tmp_path, kind), profiler="nsys", limits=limits_under("nsys", 60))


def test_wrapped_launch_has_a_result_and_a_trace(tmp_path, environ):
    plan = wrapped(tmp_path, "none")
    outcome = launch(plan, environ)
    assert (outcome.reason, outcome.agent_status, outcome.survivors) == ("exit", 0, ()), launch_failure(plan, outcome)
    result = collect_result(plan, outcome)
    assert (result.profiler, result.launcher) == ("nsys", "torchrun")
    # Ranks have exited normally, so a real profiler would have written its data.
    assert (plan.run_dir / "nsys.nsys-rep").read_text() == "exited with 0\n"
    assert mentioning(str(plan.run_dir)) == []


def test_ranks_under_a_wrapper_end_with_a_killed_guard(tmp_path, environ):
    plan, outcomes = wrapped(tmp_path, "absent"), list[LaunchOutcome]()
    launching = threading.Thread(target=lambda: outcomes.append(launch(plan, environ)))
    launching.start()
    pids = [plan.run_dir / "ranks" / str(rank) / "pid" for rank in range(plan.world.size)]
    await_true(lambda: all(pid.exists() for pid in pids))
    # The command line of the guard and of the keeper, its child, has the time limit.
    guard = min(pid for pid in mentioning("time_limit_s") if pid in mentioning(str(plan.run_dir)))
    os.kill(guard, signal.SIGKILL)
    launching.join(START_S)
    assert [outcome.reason for outcome in outcomes] == ["guard_lost"]
    await_true(lambda: mentioning(str(plan.run_dir)) == [], limit_s=30)
