"""The command ``aorta``. Each subcommand is one row of the table ``COMMANDS``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pytest_aorta.cli import agent as agent_command
from pytest_aorta.cli import devices as devices_command
from pytest_aorta.cli import init as init_command
from pytest_aorta.cli import workloads as workloads_command
from pytest_aorta.cli.baselines import command as baselines_command
from pytest_aorta.cli.bisect import command as bisect_command
from pytest_aorta.cli.doctor import command as doctor_command
from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.cli.history import command as history_command
from pytest_aorta.cli.report import command as report_command
from pytest_aorta.cli.report import comment as comment_command
from pytest_aorta.cli.run import command as run_command
from pytest_aorta.cli.run.migration import AORTA_OPTIONS
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.signals import Terminated
from pytest_aorta.common.text import printable

# Shells that shtab supports.
SHELLS = ("bash", "zsh", "fish")
_HOW = """\
bash: aorta completion bash > ~/.local/share/bash-completion/completions/aorta
zsh:  aorta completion zsh > "${fpath[1]}/_aorta"
fish: aorta completion fish > ~/.config/fish/completions/aorta.fish"""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: Word after ``aorta``.
        help: One line for the help.
        add_arguments: Declares the options of the subcommand, and sets the default ``run``: arguments -> exit code.
        hints: Option that does not exist here -> its replacement.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    hints: Mapping[str, str] = field(default_factory=dict)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of ``aorta completion``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HOW
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    parser.set_defaults(run=_print_completion)


def _print_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell.

    Raises:
        AortaError: shtab is not installed.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise AortaError("completion needs shtab: pip install 'pytest-aorta[completion]'") from None
    print(shtab.complete(arguments.parser, shell=arguments.shell))
    return 0


COMMANDS = (
    Command("init", "write a first test, settings of pytest and .gitignore", init_command.add_arguments),
    Command(
        "run",
        "launch a workload or a training script and keep each trial's result",
        run_command.add_arguments,
        AORTA_OPTIONS,
    ),
    Command("bisect", "find the commit that changed a metric of a test", bisect_command.add_arguments),
    Command("workloads", "list workloads, or the config keys of one workload", workloads_command.add_arguments),
    Command("agent", "run this node's part of launches over several nodes", agent_command.add_arguments),
    Command("baselines", "list, show, compare and thin out stored baselines", baselines_command.add_arguments),
    Command(
        "history", "draw, check and export what --aorta-history has kept over commits", history_command.add_arguments
    ),
    Command("devices", "list devices and leases of this host, clear bad marks", devices_command.add_arguments),
    Command("report", "write a page that compares two sets of kept results", report_command.add_arguments),
    Command("comment", "write or update one comment on a pull request", comment_command.add_arguments),
    Command("doctor", "look for problems that would break a run", doctor_command.add_arguments),
    Command("completion", "print the completion script of a shell", _add_completion),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, one of ``ExitCode``.

    Raises:
        SystemExit: argparse found wrong usage, and the code is 2.
    """
    arguments = parser().parse_args(argv)
    arguments.command_line = ("aorta", *(sys.argv[1:] if argv is None else argv))
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
    """A parser whose errors name the subcommand and its help.

    Attributes:
        hints: Option that the subcommand does not have -> its replacement.
    """

    hints: Mapping[str, str]

    def __init__(self, *args: Any, hints: Mapping[str, str] | None = None, **keywords: Any):
        super().__init__(*args, **keywords)
        self.hints = hints or {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown argument is an error of this subcommand, not of ``aorta``."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = dict.fromkeys(argument.partition("=")[0] for argument in unknown)
            replaced = [f"; for {flag}: {self.hints[flag]}" for flag in flags if flag in self.hints]
            script = "; arguments of the script follow --" if getattr(known, "script", None) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(replaced)}{script}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with the code of wrong usage."""
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}; `{self.prog} --help` names what is allowed\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="aorta", description="Run training workloads as pytest-aorta does, and manage its baselines and results."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help, hints=command.hints)
        command.add_arguments(subparser)
    parser.set_defaults(parser=parser)
    return parser
