"""The command ``aorta``: looks after what pytest has stored. A command is one row of the table below."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_aorta import baselines_command, devices_command, report_command
from pytest_aorta.errors import AortaError, UsageError
from pytest_aorta.tables import printable

EXIT_PROBLEM = 1
EXIT_USAGE = 2


@dataclass(frozen=True)
class Command:
    """A word after ``aorta``.

    Attributes:
        add_arguments: to its parser; each way to use it sets the default ``run``: arguments -> exit code.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = (
    Command("baselines", "list, show, compare and thin out stored baselines", baselines_command.add_arguments),
    Command("devices", "list this host's devices and leases, clear bad marks", devices_command.add_arguments),
    Command("report", "one page that compares two sets of kept results", report_command.add_arguments),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0: well, 1: a problem was found, 2: wrong usage (argparse raises SystemExit for that)."""
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter's own flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PROBLEM
    except AortaError as error:
        print("\n".join(map(printable, f"aorta: {error}".splitlines())), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_PROBLEM
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aorta", description="Looks after what pytest-aorta has stored.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_arguments(commands.add_parser(command.name, help=command.help, description=command.help))
    return parser
