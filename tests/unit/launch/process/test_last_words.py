"""Signals that reach a rank while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from pathlib import Path
from pytest_aorta.launch.process.last_words import leave_last_words

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
