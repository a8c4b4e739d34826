"""``aorta agent``: runs this node's part of a launch that node 0 has started."""

import argparse
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.launch.nodes import node_rank, take_part
from pytest_aorta.plan.options import integer_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path, help="run folder, which all nodes share")
    where = "default: AORTA_NODE_RANK, or the number that Slurm or Kubernetes gives"
    parser.add_argument("--node-rank", metavar="N", type=integer_from(0), help=f"number of this node, from 0 ({where})")


def run(arguments: argparse.Namespace) -> int:
    """Take part until the launch has ended."""
    has_succeeded = take_part(arguments.folder, node_rank(arguments.node_rank))
    return ExitCode.OK if has_succeeded else ExitCode.PROBLEM
