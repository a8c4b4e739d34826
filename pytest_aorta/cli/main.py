"""The command ``aorta``. Each subcommand is one row of the table ``COMMANDS``."""

import argparse
import importlib
import importlib.metadata
import itertools
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_aorta.cli import ExitCode
from pytest_aorta.common import renamed
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.processes import Terminated
from pytest_aorta.common.text import printable


@dataclass(frozen=True)
class _Command:
    """A subcommand.

    Attributes:
        name: Word after ``aorta``.
        group: What the subcommand is for; the help lists subcommands by group.
        help: One line for the help.
        passed_on: What comes after ``--``, of which the command has the words as ``args``; empty if nothing does.
    """

    name: str
    group: str
    help: str
    passed_on: str = ""


_OF_SCRIPT = "arguments of the script"
# The module of a subcommand has a function ``add_arguments``, which declares the options, and a function ``run``:
# arguments -> exit code.
COMMANDS = (
    _Command("doctor", "start", "look for problems that would break a run, and list GPUs and leases"),
    _Command(
        "init",
        "start",
        "write a first test and settings of pytest",
        f"{_OF_SCRIPT}, or a command that starts its own ranks",
    ),
    _Command("run", "test", "launch a workload or a training script and keep each trial's result", _OF_SCRIPT),
    _Command(
        "selftest", "test", "plant faults into the launches of tests, and show which are found", "options of pytest"
    ),
    _Command(
        "arrange",
        "test",
        "compare a script's gradients with those of other ranks and batches, without a baseline",
        _OF_SCRIPT,
    ),
    _Command(
        "scale", "test", "show how the costs of a step grow with the number of ranks, without devices", _OF_SCRIPT
    ),
    _Command("baselines", "baselines", "rewrite and add stored baselines"),
    _Command("history", "reports", "find changes in what --aorta-history has kept over commits"),
    _Command("comment", "CI", "check the findings of a job and write them as Markdown for a comment"),
    _Command("bisect", "CI", "find the commit that changed a metric of a test", "one test and options of pytest"),
    _Command("agent", "cluster", "run this node's part of launches over several nodes"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, one of ``ExitCode``.

    Raises:
        SystemExit: argparse found wrong usage, and the code is 2.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    top = parser(given)
    if given and given[0] in renamed.COMMANDS:
        top.error(f"{given[0]}: use {renamed.COMMANDS[given[0]]}")
    arguments = top.parse_args(given)
    arguments.command_line = ("aorta", *given)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; redirect stdout, so that the flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PROBLEM
    except AortaError as error:
        print("\n".join(map(printable, f"aorta: {error}".splitlines())), file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError | SpecError) else ExitCode.PROBLEM
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(f"aorta: ended by {number.name}; finished launches are kept", file=sys.stderr)
        return ExitCode.SIGNALED + number
    return code


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the subcommand and its help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown argument is an error of this subcommand, not of ``aorta``.

        If the subcommand has a default for ``args``, these are the words after ``--``, as they are.
        """
        words, passed_on = list(args), self.get_default("args")
        if passed_on is not None and "--" in words:
            at = words.index("--")
            words, passed_on = words[:at], tuple(words[at + 1 :])
        known, unknown = super().parse_known_args(words, namespace)
        if passed_on is not None:
            known.args = passed_on
        if unknown:
            hint = "; arguments of a script or of pytest follow --" if passed_on is not None else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with the code of wrong usage."""
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}; `{self.prog} --help` names what is allowed\n")


def _groups() -> Iterator[str]:
    """Yield the lines of the help on subcommands, by group."""
    for group, commands in itertools.groupby(COMMANDS, key=lambda command: command.group):
        yield f"{group}:"
        yield from (f"  {command.name:<10} {command.help}" for command in commands)


def parser(words: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command.

    Args:
        words: The words of a command line. Only the subcommands among them get their arguments; None: all get them.
    """
    parser = Parser(
        prog="aorta",
        usage="aorta [--help] [--version] COMMAND ...",
        description="Run training workloads as pytest-aorta does, and manage its baselines and results.",
        epilog="\n".join(_groups()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"aorta {importlib.metadata.version('pytest-aorta')}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version of pytest-aorta and exit"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help=argparse.SUPPRESS, prog="aorta")
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, description=command.help)
        if words is None or command.name in words:
            # Importing all modules takes ten times as long as showing the help.
            module = importlib.import_module(f"{__package__}.{command.name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
            if command.passed_on:
                subparser.set_defaults(args=())
                subparser.epilog = f"After -- come {command.passed_on}. {subparser.epilog or ''}"
    return parser
