"""Signals that reach a rank while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from pathlib import Path
from pytest_aorta.launch.process.rank import leave_last_words

install = {"signal": signal.signal, "set_wakeup_fd": signal.set_wakeup_fd}

def interrupted(name):
    def call(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return install[name](*args, **kwargs)
    return call

setattr(signal, sys.argv[1], interrupted(sys.argv[1]))
leave_last_words(Path(sys.argv[2]), open(os.devnull, "w"))
sys.stdin.read()
"""


@pytest.mark.parametrize("step", ["signal", "set_wakeup_fd"])
def test_sigterm_that_arrives_while_its_handler_is_installed_ends_the_rank(tmp_path, step):
    command = [sys.executable, "-c", SCRIPT, step, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        try:
            assert rank.wait(60) == -signal.SIGTERM
        finally:
            rank.kill()


OWN_HANDLER = """
import os, signal, sys, time
from pathlib import Path
from pytest_aorta.launch.process.rank import leave_last_words

stacks = Path(sys.argv[1], "stacks.txt")
leave_last_words(Path(sys.argv[1]), stacks.open("w"))
before = signal.getsignal(signal.SIGTERM)

def save(number, frame):
    while "in save" not in stacks.read_text():
        time.sleep(0.01)
    time.sleep(0.5)
    print("saved", flush=True)
    if sys.argv[2] == "exits":
        sys.exit(7)
    if sys.argv[2] == "calls the former handler":
        before(number, frame)

def own_handler_of_child():
    if (child := os.fork()) == 0:
        os._exit(signal.getsignal(signal.SIGTERM) is save)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

signal.signal(signal.SIGTERM, save)
print("child has it:", own_handler_of_child(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[2] == "goes on":
    sys.exit(8)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("after", "status"), [("exits", 7), ("goes on", 8), ("calls the former handler", -signal.SIGTERM)]
)
def test_scripts_own_handler_finishes_its_work_and_decides_what_follows(tmp_path, after, status):
    command = [sys.executable, "-c", OWN_HANDLER, str(tmp_path), after]
    rank = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=60, text=True)
    assert (rank.stdout, rank.returncode) == ("child has it: True\nsaved\n", status)


FORK = """
import os, signal, sys, time
from pathlib import Path
from pytest_aorta.launch.process.rank import leave_last_words

stacks = Path(sys.argv[1], "stacks.txt")
leave_last_words(Path(sys.argv[1]), stacks.open("w"))
ready, has_started = os.pipe()
if (child := os.fork()) == 0:
    os.write(has_started, b".")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), repr(stacks.read_text()))
"""


def test_forked_child_without_a_handler_of_its_own_ends_and_wakes_no_thread_of_the_rank(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    rank = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, text=True)
    assert rank.stdout == f"{-signal.SIGTERM} ''\n"
