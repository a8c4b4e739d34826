"""The end of a warm launch's ranks, whose processes are children of a program of their own."""

from __future__ import annotations

import subprocess
import sys

STOPPED_BETWEEN_WAIT_AND_RECORD = """
import os, signal
from pathlib import Path
from pytest_aorta.launch.process.forkserver import WarmAgent, fork

ended, running = fork(signal.pause), fork(signal.pause)
os.kill(ended, signal.SIGKILL)
os.waitpid(ended, 0)
agent = WarmAgent(Path(), 2)
agent.running = {ended: 0, running: 1}
agent.stop()
print(os.path.exists(f"/proc/{running}"))
"""

HOLDING_THE_GIL = """
import faulthandler, itertools, signal, time
from pathlib import Path
from pytest_aorta.launch.process import forkserver as warm_agent

def hold(stacks, ready):
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGTERM, print)
    ready.touch()
    sum(itertools.repeat(0))

warm_agent.TERM_S = 0.1
stacks, ready = open("stacks.txt", "w"), Path("ready")
rank = warm_agent.fork(lambda: hold(stacks, ready))
while not ready.exists():
    time.sleep(0.01)
agent = warm_agent.WarmAgent(Path(), 1)
agent.running = {rank: 0}
agent.stop()
print("in hold" in Path("stacks.txt").read_text(), Path(f"/proc/{rank}").exists())
"""


def test_rank_that_holds_the_gil_writes_its_stacks_before_it_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDING_THE_GIL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("True False\n", "")


def test_ranks_are_ended_even_if_the_end_of_one_could_not_be_recorded():
    """SIGTERM can arrive after a rank was waited for and before its exit code is recorded."""
    command = [sys.executable, "-c", STOPPED_BETWEEN_WAIT_AND_RECORD]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("False\n", "")
