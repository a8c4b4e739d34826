"""``aorta agent``: runs this node's part of a launch that node 0 has started."""

import argparse
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.launch.nodes import node_rank, take_part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path, help="run folder, which all nodes share")


def run(arguments: argparse.Namespace) -> int:
    """Take part until the launch has ended."""
    has_succeeded = take_part(arguments.folder, node_rank())
    return ExitCode.OK if has_succeeded else ExitCode.PROBLEM
