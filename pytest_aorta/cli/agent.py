"""``aorta agent``: run this node's part of launches that pytest starts on node 0."""

from __future__ import annotations

import argparse
import sys
import time

from pytest_aorta.common.errors import UsageError
from pytest_aorta.launch.nodes.agent import Agent, NodeZeroLost, read_token
from pytest_aorta.launch.nodes.handover import node_rank
from pytest_aorta.plan.options import parse_endpoint

POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="where node 0 is")
    parser.add_argument(
        "--node-rank", metavar="N", type=_count, help="which node this is, from 0 (default: environment)"
    )
    parser.add_argument("--wait", action="store_true", help="wait for launches, one after the other")
    parser.add_argument(
        "--idle-timeout", metavar="SECONDS", type=float, default=3600.0, help="end after waiting that long (3600)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take part in one launch, or with ``--wait`` in all that come; 1 where node 0 was lost."""
    try:
        host, port = parse_endpoint(arguments.connect)
    except ValueError as error:
        raise UsageError(f"--connect: got {arguments.connect!r}, allowed is {error}") from None
    if port == 0:
        raise UsageError(f"--connect: got {arguments.connect!r}, which has no port")
    agent = Agent((host, port), node_rank(arguments.node_rank), read_token(), is_waiting=arguments.wait)
    if not arguments.wait:
        agent.serve()
        return 0
    idle_since_s, last = time.monotonic(), ""
    while time.monotonic() - idle_since_s < arguments.idle_timeout:
        try:
            agent.serve()
            idle_since_s = time.monotonic()
        except NodeZeroLost as error:
            if str(error) != last:  # most of the time nobody is there, which is no news
                last = str(error)
                print(f"aorta agent: waiting: {last}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError("an integer of 0 or more is needed")
    return int(text)
