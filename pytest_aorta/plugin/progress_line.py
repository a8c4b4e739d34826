"""One line on the user's terminal that tells how far a launch is, and that leaves nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import pytest

from pytest_aorta.launch.watch import LaunchState

# Below it, there is nothing worth telling.
MIN_WIDTH = 20
# DECSC, DECRC and EL: where the cursor is, back to it, and nothing from there on.
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"
_CI = ("CI", "BUILD_NUMBER")


def progress_text(state: LaunchState) -> str:
    """Workload, ranks, step and elapsed seconds."""
    step = f"step {state.steps}" + (f" of {state.total_steps}" if state.total_steps else "")
    if state.started < state.num_ranks:
        what = f"{state.started} of {state.num_ranks} ranks started"
    elif state.done:
        what = f"{state.num_ranks} ranks, {state.done} done"
    elif state.steps:
        what = f"{state.num_ranks} ranks, {step}"
    else:
        what = f"{state.num_ranks} ranks, before the first measured step"
    return f"{state.name}: {what}, {state.elapsed_s:.0f} s"


class ProgressLine:
    """Writes behind what pytest has written of the present line, and takes it back.

    It has a descriptor of the terminal of its own, taken while nothing is captured: so it disturbs no capture, and
    no capture gets it.
    """

    def __init__(self, terminal_fd: int, columns_used: Callable[[], int] = lambda: 0) -> None:
        self._fd = terminal_fd
        self._columns_used = columns_used
        self._is_shown = False

    def show(self, state: LaunchState) -> None:
        """In place of what it showed before, cut to the room that pytest's own text has left."""
        room = self._room()
        if room < MIN_WIDTH:
            return
        self._write(f"{_ERASE}{_SAVE} {progress_text(state)[: room - 1]}{_RESTORE}")
        self._is_shown = True

    def clear(self) -> None:
        """Erase it; the cursor is where pytest left it."""
        if self._is_shown:
            self._write(_ERASE)
        self._is_shown = False

    def close(self) -> None:
        """Give the terminal back."""
        os.close(self._fd)

    def _room(self) -> int:
        """Columns to the end of the line; the last one is left alone, since terminals differ in when they wrap."""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:
            return 0
        return columns - self._columns_used() - 1

    def _write(self, text: str) -> None:
        try:
            os.write(self._fd, text.encode("ascii", "replace"))
        except OSError:  # the terminal is gone, and whoever looked at it
            self._is_shown = False


def wanted(choice: str, config: pytest.Config, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to write on a terminal: ``on`` does so in CI too, where ``auto`` does not.

    Never where there is no terminal, in a worker of xdist, or beside what tests write themselves (``-s``).
    """
    if choice == "off" or hasattr(config, "workerinput") or config.getoption("capture") == "no":
        return False
    if not config.pluginmanager.has_plugin("terminalreporter"):
        return False
    if not sys.stdout.isatty() or environ.get("TERM", "") in ("", "dumb"):
        return False
    return choice == "on" or not any(environ.get(name) for name in _CI)


def open_line(choice: str, config: pytest.Config) -> ProgressLine | None:
    """The line on pytest's terminal, None where it is not wanted. Call it while nothing is captured."""
    if not wanted(choice, config):
        return None
    writer = config.get_terminal_writer()
    return ProgressLine(os.dup(sys.stdout.fileno()), lambda: writer.width_of_current_line)
