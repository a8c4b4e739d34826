"""The command ``aorta``: its exit codes, problems that do not end it, and a module for each subcommand."""

import argparse
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

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


def add_folder(parser: argparse.ArgumentParser, name: str, about: str) -> None:
    """Declare the option ``--NAME``, a folder whose default is NAME in the current folder."""
    about = f"{about} (default: {name})"
    parser.add_argument(f"--{name}", metavar="DIR", type=Path, default=Path(name), help=about)


def report_problems(problems: Sequence[str]) -> int:
    """Print problems to stderr and return the exit code."""
    for problem in problems:
        print(f"aorta: {printable(problem)}", file=sys.stderr)
    return ExitCode.PROBLEM if problems else ExitCode.OK
