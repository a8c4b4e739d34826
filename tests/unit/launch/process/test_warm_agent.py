"""The end of a warm launch's ranks, whose processes are children of a program of their own."""

from __future__ import annotations

import subprocess
import sys

STOPPED_BETWEEN_WAIT_AND_RECORD = """
import os, signal
from pathlib import Path
from pytest_aorta.launch.process.warm_agent import WarmAgent, fork

ended, running = fork(signal.pause), fork(signal.pause)
os.kill(ended, signal.SIGKILL)
os.waitpid(ended, 0)
agent = WarmAgent(Path(), 2)
agent.running = {ended: 0, running: 1}
agent.stop()
print(os.path.exists(f"/proc/{running}"))
"""


def test_ranks_are_ended_even_if_the_end_of_one_could_not_be_recorded():
    """SIGTERM can arrive after a rank was waited for and before its exit code is recorded."""
    command = [sys.executable, "-c", STOPPED_BETWEEN_WAIT_AND_RECORD]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("False\n", "")
