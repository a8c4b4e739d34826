"""Runs of pytest that subcommands start."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pytest_aorta.cli.pytest_run import run_pytest
from pytest_aorta.common.errors import AortaError

SLOW = """
import os, pathlib, time

def test_slow():
    pathlib.Path("written").write_text(str(os.getpid()))
    pathlib.Path("written").rename("pid")
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_command_ends_pytest_too(tmp_path, number):
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest_aorta.cli", "selftest", "test_slow.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    limit_s = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and process.poll() is None and time.monotonic() < limit_s:
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_pytest_that_does_not_run_the_tests_is_an_error_with_its_output(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    with pytest.raises(AortaError, match=r"pytest ended with exit code 4:\n(.*\n)*.*no-such-option"):
        run_pytest([f"--rootdir={tmp_path}", "--no-such-option"], tmp_path)
