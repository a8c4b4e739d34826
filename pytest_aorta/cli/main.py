"""The command ``aorta``: runs workloads, and looks after what was stored. A command is one row of the table below."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_aorta.cli import agent as agent_command
from pytest_aorta.cli import devices as devices_command
from pytest_aorta.cli import report as report_command
from pytest_aorta.cli import workloads as workloads_command
from pytest_aorta.cli.baselines import command as baselines_command
from pytest_aorta.cli.doctor import command as doctor_command
from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.cli.run import command as run_command
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.signals import Terminated
from pytest_aorta.common.text import printable

# Of those that shtab knows.
SHELLS = ("bash", "zsh", "fish")
_HOW = """\
bash: aorta completion bash > ~/.local/share/bash-completion/completions/aorta
zsh:  aorta completion zsh > "${fpath[1]}/_aorta"
fish: aorta completion fish > ~/.config/fish/completions/aorta.fish"""


@dataclass(frozen=True)
class Command:
    """A word after ``aorta``.

    Attributes:
        add_arguments: to its parser; each way to use it sets the default ``run``: arguments -> exit code.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _add_completion(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HOW
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    parser.set_defaults(run=_print_completion)


def _print_completion(arguments: argparse.Namespace) -> int:
    """Print the script.

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
    Command("run", "launch a workload or a training script and keep each trial's result", run_command.add_arguments),
    Command("workloads", "list workloads, or one's config keys", workloads_command.add_arguments),
    Command("agent", "run this node's part of launches over several nodes", agent_command.add_arguments),
    Command("baselines", "list, show, compare and thin out stored baselines", baselines_command.add_arguments),
    Command("devices", "list this host's devices and leases, clear bad marks", devices_command.add_arguments),
    Command("report", "one page that compares two sets of kept results", report_command.add_arguments),
    Command("doctor", "look for what would break a run, with the remedy", doctor_command.add_arguments),
    Command("completion", "print the completion script of a shell", _add_completion),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns 0: well, 1: a problem was found, 2: wrong usage (argparse raises SystemExit for that), 128 and a signal's
    number: it ended the command.
    """
    arguments = parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter's own flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PROBLEM
    except AortaError as error:
        print("\n".join(map(printable, f"aorta: {error}".splitlines())), file=sys.stderr)
        return ExitCode.USAGE if isinstance(error, UsageError | SpecError) else ExitCode.PROBLEM
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(f"aorta: ended by {number.name}; trials that were done are kept", file=sys.stderr)
        return ExitCode.SIGNALED + number
    return code


class Parser(argparse.ArgumentParser):
    """Says what is wrong in the name of the subcommand that it was typed after, and where to read what is allowed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As its base has it, but that what it does not know is an error here, not of ``aorta``."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """End with the exit code of wrong usage."""
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}; `{self.prog} --help` names what is allowed\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = Parser(
        prog="aorta", description="Runs training workloads as pytest-aorta does, and looks after what it has stored."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_arguments(commands.add_parser(command.name, help=command.help, description=command.help))
    parser.set_defaults(parser=parser)
    return parser
