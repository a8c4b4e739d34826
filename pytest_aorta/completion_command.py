"""``aorta completion``: what a shell loads to complete the command, made by shtab from its parser."""

from __future__ import annotations

import argparse
import importlib

from pytest_aorta.errors import AortaError

# Of those that shtab knows.
SHELLS = ("bash", "zsh", "fish")
_HOW = """\
bash: aorta completion bash > ~/.local/share/bash-completion/completions/aorta
zsh:  aorta completion zsh > "${fpath[1]}/_aorta"
fish: aorta completion fish > ~/.config/fish/completions/aorta.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HOW
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
