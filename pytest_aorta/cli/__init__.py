"""The command ``aorta``: its exit codes, problems that do not end it, and a module for each subcommand."""

import sys
from collections.abc import Sequence
from enum import IntEnum

from pytest_aorta.common.text import printable


class ExitCode(IntEnum):
    """An exit code of the command."""

    OK = 0
    # A launch, a check or a comparison failed, or this machine lacks something.
    PROBLEM = 1
    # The command line is wrong; nothing was launched.
    USAGE = 2
    # Added to the number of the signal that ended the command.
    SIGNALED = 128


def report_problems(problems: Sequence[str]) -> int:
    """Print problems to stderr and return the exit code."""
    for problem in problems:
        print(f"aorta: {printable(problem)}", file=sys.stderr)
    return ExitCode.PROBLEM if problems else ExitCode.OK
