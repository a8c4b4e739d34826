"""``aorta agent``: the node agent, which runs this node's part of a launch that pytest has started on node 0."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_aorta.launch.node_agent import node_rank, take_part
from pytest_aorta.plan.options import integer_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path, help="run folder, which all nodes share")
    parser.add_argument(
        "--node-rank",
        metavar="N",
        type=integer_from(0),
        help="number of this node, from 0 (default: AORTA_NODE_RANK, or the number that Slurm or Kubernetes gives)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take part in the launch."""
    take_part(arguments.folder, node_rank(arguments.node_rank))
    return 0
