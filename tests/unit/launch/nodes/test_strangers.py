"""Connections to node 0 that prove no token: they do not keep a node agent out."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.launch.nodes import agent as agent_module
from pytest_aorta.launch.nodes.agent import Agent, NodeZeroLost
from pytest_aorta.launch.nodes.coordinator import MAX_STRANGERS, Coordinator
from pytest_aorta.launch.nodes.handover import versions
from pytest_aorta.launch.nodes.wire import LOST_S, Wire

TOKEN = "secret"


def coordinator(stack: ExitStack, tmp_path: Path) -> Coordinator:
    lifeline, other_end = socket.socketpair()
    stack.enter_context(lifeline)
    stack.enter_context(other_end)
    spec: dict[str, Any] = {
        "run_dir": str(tmp_path),
        "num_nodes": 1,
        "world_size": 1,
        "versions": versions(),
        "lifeline_fd": lifeline.fileno(),
        "launcher": [],
    }
    node_zero = Coordinator(spec, TOKEN)
    node_zero.listener = socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_STRANGERS)
    stack.callback(node_zero.close)
    return node_zero


def test_agent_is_admitted_while_idle_connections_fill_every_place(tmp_path):
    with ExitStack() as stack:
        node_zero = coordinator(stack, tmp_path)
        endpoint = node_zero.listener.getsockname()
        for _ in range(MAX_STRANGERS):
            stack.enter_context(socket.create_connection(endpoint))
        while len(node_zero.strangers) < MAX_STRANGERS:
            node_zero.turn()
        agent = Agent(endpoint, 0, TOKEN)

        def join() -> None:
            wire = agent.connect(stack)
            wire.send(agent.hello(wire, None, versions()))

        thread = threading.Thread(target=join)
        thread.start()
        deadline_s = time.monotonic() + 6 * LOST_S
        while not node_zero.nodes and time.monotonic() < deadline_s and (thread.is_alive() or node_zero.strangers):
            node_zero.turn()
        thread.join()
        assert list(node_zero.nodes) == [0]
        assert "proved no token" in node_zero.refusal


def test_agent_tries_again_when_node_zero_has_closed_its_connection():
    wires: list[Wire] = []
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse_twice() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            wires.append(Wire(listener.accept()[0], TOKEN.encode(), is_server=True))

        thread = threading.Thread(target=refuse_twice)
        thread.start()
        agents = Agent(listener.getsockname(), 1, TOKEN, join_timeout_s=60).connect(stack)
        thread.join()
        stack.callback(wires[0].close)
        agents.send({"type": "hello"})
        assert wires[0].receive() == [{"type": "hello"}]


def test_agent_reads_its_sources_before_node_zero_waits_for_its_first_message(monkeypatch):
    """Node 0 waits ten seconds for the message, and reading sources from a cold network disk can take longer."""
    has_read = threading.Event()
    monkeypatch.setattr(agent_module, "versions", has_read.set)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(NodeZeroLost, match="Connection refused"):
            Agent(closed.getsockname(), 1, TOKEN).serve()
    assert has_read.is_set()


def test_agent_with_another_token_does_not_try_again():
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            stack.callback(Wire(listener.accept()[0], b"another", is_server=True).close)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(NodeZeroLost, match="different AORTA_AGENT_TOKEN"):
            Agent(listener.getsockname(), 1, TOKEN, join_timeout_s=600).connect(stack)
        thread.join()
