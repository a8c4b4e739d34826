"""Ranks that lose the guard and the agent before their own code runs: only they can end themselves."""

import os
import signal
import threading

from pytest_aorta.launch.guarded import launch
from pytest_aorta.result.outcome import LaunchOutcome
from tests.distributed.processes import START_S, await_true, mentioning, parent_of
from tests.distributed.test_faults import make_plan

# Python runs this code before a rank's program.
SLOW_START = """
import os, sys, time
if "pytest_aorta.launch.process.rank" in sys.orig_argv and "pytest_aorta.launch.process.torchrun" not in sys.orig_argv:
    with open(os.environ["STARTED"], "a") as file:
        file.write(f"{os.getppid()}\\n")
    time.sleep(1.5)
"""


def test_rank_ends_itself_when_the_guard_is_killed_while_python_starts(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_START, encoding="utf-8")
    started, outcomes = tmp_path / "started", list[LaunchOutcome]()
    started.touch()
    plan = make_plan(tmp_path, "none")
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "STARTED": str(started)}
    launching = threading.Thread(target=lambda: outcomes.append(launch(plan, environ)))
    launching.start()
    await_true(lambda: len(started.read_text().splitlines()) == plan.world.size)
    os.kill(parent_of(parent_of(int(started.read_text().split()[0]))), signal.SIGKILL)
    launching.join(START_S)
    assert [outcome.reason for outcome in outcomes] == ["guard_lost"]
    await_true(lambda: mentioning(str(plan.run_dir)) == [], limit_s=30)
