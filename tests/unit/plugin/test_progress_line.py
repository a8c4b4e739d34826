"""The line that shows the progress of a launch, on a terminal of its own."""

import fcntl
import os
import pty
import struct
import termios
from dataclasses import replace

import pytest
from _pytest.terminal import TerminalReporter

from pytest_aorta.launch.watch import LaunchState
from pytest_aorta.plugin.progress_line import ProgressLine, wanted

STATE = LaunchState("fsdp", 2, started=2, steps=57, total_steps=100, done=0, elapsed_s=12.4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "fsdp: 2 ranks, step 57 of 100, 12 s"),
        ({"total_steps": None}, "fsdp: 2 ranks, step 57, 12 s"),
        ({"started": 1, "steps": 0}, "fsdp: 1 of 2 ranks started, 12 s"),
        ({"steps": 0}, "fsdp: 2 ranks, before the first measured step, 12 s"),
        ({"done": 1}, "fsdp: 2 ranks, 1 done, 12 s"),
    ],
)
def test_text_says_step_ranks_and_elapsed_seconds(changes, text):
    assert replace(STATE, **changes).text == text


@pytest.fixture
def terminal():
    """A function that reads the written text, and the descriptor to write to: a terminal of 60 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    os.set_blocking(master, False)

    def written() -> str:
        try:
            return os.read(master, 4096).decode()
        except BlockingIOError:
            return ""

    yield written, slave
    os.close(master)
    os.close(slave)


def test_text_is_cut_to_the_room_that_is_left(terminal):
    written, fd = terminal
    ProgressLine(fd, lambda: 35).show(STATE)
    text = written().removeprefix("\x1b[K\x1b7").removesuffix("\x1b8")
    # The last column stays free.
    assert (text, len(text)) == (" fsdp: 2 ranks, step 57 ", 60 - 35 - 1)


def test_nothing_is_written_where_there_is_no_room_and_nothing_is_cleared_then(terminal):
    written, fd = terminal
    line = ProgressLine(fd, lambda: 50)
    line.show(STATE)
    line.clear()
    assert written() == ""


def test_closed_line_writes_into_no_file_that_got_its_number(terminal, tmp_path):
    """The thread that shows the line outlives the session if the driver of a device hangs."""
    number = os.dup(terminal[1])
    line = ProgressLine(number)
    line.show(STATE)
    with (tmp_path / "file").open("wb") as file:
        line.close()
        os.dup2(file.fileno(), number)
        line.clear()
        line.show(STATE)
        os.close(number)
    assert (tmp_path / "file").read_bytes() == b""


class OtherReporter(TerminalReporter):
    """The reporter of a plugin that draws the terminal, such as pytest-sugar."""


class FakeConfig:
    """The parts of a pytest run that matter here."""

    def __init__(self, *, capture="fd", reporter=TerminalReporter):
        self.capture = capture
        self.pluginmanager = self
        self.reporter = reporter and reporter.__new__(reporter)

    def getoption(self, name, default):
        return {"capture": self.capture}.get(name) or default

    def get_plugin(self, name):
        return {"terminalreporter": self.reporter}[name]


@pytest.fixture
def on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"CI": ""}, True),
        ({"CI": "true"}, False),
        ({"BUILD_NUMBER": "7"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
    ],
)
def test_line_is_wanted_on_a_terminal_and_not_in_ci(on_a_terminal, environ, expected):
    assert wanted(FakeConfig(), {"TERM": "xterm"} | environ) is expected


IN_WORKER = FakeConfig()
IN_WORKER.workerinput = {}
REPORTED = [FakeConfig(reporter=None), FakeConfig(reporter=OtherReporter)]


@pytest.mark.parametrize("config", [FakeConfig(capture="no"), FakeConfig(capture=None), *REPORTED, IN_WORKER])
def test_line_is_not_wanted_beside_what_tests_print_or_in_a_worker(on_a_terminal, config):
    assert not wanted(config, {"TERM": "xterm"})


def test_line_is_never_wanted_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert not wanted(FakeConfig(), {"TERM": "xterm"})
