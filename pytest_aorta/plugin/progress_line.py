"""The progress line: one line on the terminal about the running launch, erased at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pytest_aorta.common.text import visible
from pytest_aorta.launch.watch import SpokenState

if TYPE_CHECKING:
    from pytest_aorta.launch.watch import LaunchState

# With fewer free columns, the line is not shown.
MIN_WIDTH = 20
# Terminal commands DECSC, DECRC and EL: save the cursor, restore it, erase the rest of the line.
_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"
_CI = ("CI", "BUILD_NUMBER")


class ProgressLine:
    """The progress line, written after pytest's own text on the current line of the terminal.

    The line writes to its own descriptor of the terminal, which is opened while pytest captures nothing. Therefore the
    line does not appear in captured output.
    """

    def __init__(self, terminal_fd: int, columns_used: Callable[[], int] = lambda: 0) -> None:
        self._fd = terminal_fd
        self._columns_used = columns_used
        self._is_shown = False

    def show(self, state: LaunchState) -> None:
        """Replace the text of the line, cut to the columns that pytest's own text leaves free."""
        room = self._room()
        if room < MIN_WIDTH:
            return
        self._write(f"{_ERASE}{_SAVE} {state.text[: room - 1]}{_RESTORE}")
        self._is_shown = True

    def clear(self) -> None:
        """Erase the line; the cursor stays where pytest left it."""
        if self._is_shown:
            self._write(_ERASE)
        self._is_shown = False

    def follow(self, text: str) -> None:
        """Leave the number of launches to the line, which shows the launch itself."""

    def close(self) -> None:
        """Close the descriptor of the terminal; a thread that still shows states writes nowhere from now on."""
        # Another file may get the number.
        closed_fd, self._fd = self._fd, -1
        os.close(closed_fd)

    def _room(self) -> int:
        """Return the free columns, without the last one, since terminals differ in when they wrap."""
        try:
            columns = os.get_terminal_size(self._fd).columns
        except OSError:
            return 0
        return columns - self._columns_used() - 1

    def _write(self, text: str) -> None:
        try:
            os.write(self._fd, text.encode("ascii", "replace"))
        except OSError:  # the terminal was closed
            self._is_shown = False


class LogLine(SpokenState):
    """Lines in a log, or beside the progress line, written to a descriptor of standard error that nothing captures.

    A worker of xdist has the standard error of the process that started it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def say(self, text: str) -> None:
        """Write lines, below those of pytest."""
        with suppress(OSError):  # a log that was closed ends no test
            os.write(self._fd, f"\naorta: {visible(text)}\n".encode(errors="replace"))

    def close(self) -> None:
        """Close the descriptor."""
        closed_fd, self._fd = self._fd, -1
        os.close(closed_fd)


def wanted(config: pytest.Config, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process shows the progress line.

    The line is not shown in CI, without a terminal or pytest's own reporter, in a worker of xdist, or with ``-s``,
    where tests write to the terminal themselves.
    """
    if hasattr(config, "workerinput") or config.getoption("capture", "no") == "no":
        return False
    # A reporter of another plugin, such as pytest-sugar's, draws the current line itself.
    if type(config.pluginmanager.get_plugin("terminalreporter")).__module__ != "_pytest.terminal":
        return False
    if not sys.stdout.isatty() or environ.get("TERM", "") in ("", "dumb"):
        return False
    return not any(environ.get(name) for name in _CI)


def open_line(config: pytest.Config) -> ProgressLine | None:
    """Return the progress line, or None if it is not wanted; call this function while pytest captures nothing."""
    if not wanted(config):
        return None
    writer = config.get_terminal_writer()
    return ProgressLine(os.dup(sys.stdout.fileno()), lambda: writer.width_of_current_line)
