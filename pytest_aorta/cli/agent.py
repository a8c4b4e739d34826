"""``aorta agent``: the node agent, which runs this node's part of launches that pytest starts on node 0."""

from __future__ import annotations

import argparse
import sys
import time

from pytest_aorta.common.errors import UsageError
from pytest_aorta.launch.nodes.agent import Agent, NodeZeroLost, read_token
from pytest_aorta.launch.nodes.handover import node_rank
from pytest_aorta.plan.options import integer_from, parse_endpoint

POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--connect", metavar="HOST:PORT", type=parse_endpoint, required=True, help="address of node 0")
    parser.add_argument(
        "--node-rank",
        metavar="N",
        type=integer_from(0),
        help="number of this node, from 0 (default: AORTA_NODE_RANK, or the number that Slurm or Kubernetes gives)",
    )
    parser.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="time to keep trying to connect to node 0 (default: try once)",
    )
    parser.add_argument("--wait", action="store_true", help="wait for launches, and run one after the other")
    parser.add_argument(
        "--idle-timeout",
        metavar="SECONDS",
        type=float,
        default=3600.0,
        help="with --wait: end after this time without a launch (default: 3600)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take part in one launch, or with ``--wait`` in each launch until none starts within the idle timeout."""
    host, port = arguments.connect
    if port == 0:
        raise UsageError(f"--connect: got {host!r} without a port, allowed is HOST:PORT")
    agent = Agent((host, port), node_rank(arguments.node_rank), read_token(), arguments.wait, arguments.join_timeout)
    if not arguments.wait:
        agent.serve()
        return 0
    idle_since_s, last = time.monotonic(), ""
    while time.monotonic() - idle_since_s < arguments.idle_timeout:
        try:
            agent.serve()
            idle_since_s = time.monotonic()
        except NodeZeroLost as error:
            if str(error) != last:  # report each reason once: between launches nobody listens on node 0
                last = str(error)
                print(f"aorta agent: waiting: {last}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    return 0
