"""Exit codes of the command ``aorta``."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code of the command."""

    OK = 0
    # A launch, a check or a comparison failed, or this machine lacks something.
    PROBLEM = 1
    # The command line is wrong; nothing was launched.
    USAGE = 2
    # Added to the number of the signal that ended the command.
    SIGNALED = 128
