"""Connections to node 0 that prove no token: they do not keep a node agent out."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.launch.nodes import agent as agent_module
from pytest_aorta.launch.nodes import coordinator as coordinator_module
from pytest_aorta.launch.nodes.agent import Agent, NodeZeroLost
from pytest_aorta.launch.nodes.coordinator import MAX_STRANGERS, Coordinator
from pytest_aorta.launch.nodes.handover import versions
from pytest_aorta.launch.nodes.node import NodeFailed
from pytest_aorta.launch.nodes.wire import LOST_S, Wire, WireError

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


def test_waiting_agent_that_is_not_needed_is_disconnected(tmp_path):
    with ExitStack() as stack:
        node_zero = coordinator(stack, tmp_path)
        for is_waiting in (False, True):
            agent = Agent(node_zero.listener.getsockname(), 0, TOKEN, is_waiting=is_waiting, join_timeout_s=30)
            with ThreadPoolExecutor(1) as pool:
                connected = pool.submit(agent.connect, stack)
                while not connected.done():
                    node_zero.turn()
            wire = connected.result()
            wire.send(agent.hello(wire, None, versions()))
            while node_zero.strangers:
                node_zero.turn()
        with pytest.raises(WireError, match="the connection was closed"):
            list(iter(wire.receive, None))
        assert list(node_zero.nodes) == [0]


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


@contextmanager
def room_for(num_files: int) -> Iterator[int]:
    """Let this process open ``num_files`` more files, and yield its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        # Files get the lowest free number, and the limit is one of numbers.
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        limit = fds[-1] + 1
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        for fd in fds[:num_files]:
            os.close(fd)
        for fd in fds[num_files:]:
            stack.callback(os.close, fd)
        yield limit


def test_node_zero_that_can_open_no_more_files_waits_until_it_has_closed_some(tmp_path, monkeypatch):
    with ExitStack() as stack:
        node_zero = coordinator(stack, tmp_path)
        for _ in range(4):
            stack.enter_context(socket.create_connection(node_zero.listener.getsockname()))
        stack.enter_context(room_for(7))
        node_zero.turn()
        node_zero.turn()
        node_zero.turn()
        first = set(node_zero.strangers)
        assert len(first) == 2
        began_s = time.monotonic()
        node_zero.turn()
        assert time.monotonic() - began_s >= coordinator_module.TICK_S
        monkeypatch.setattr(coordinator_module, "LOST_S", 0.0)
        node_zero.turn()
        monkeypatch.undo()
        node_zero.turn()
        assert len(node_zero.strangers) == 1
        assert first.isdisjoint(node_zero.strangers)


@pytest.mark.parametrize("num_files", [0, 1, 2])
def test_node_zero_that_may_open_too_few_files_names_the_limit_and_what_it_needs(tmp_path, num_files):
    with ExitStack() as stack:
        node_zero = coordinator(stack, tmp_path)
        node_zero.spec |= {"num_nodes": 30, "join_timeout_s": 20.0}
        stack.enter_context(socket.create_connection(node_zero.listener.getsockname()))
        limit = stack.enter_context(room_for(num_files))
        with pytest.raises(NodeFailed) as caught:
            node_zero.join()
    assert caught.value.reason == "node_launcher"
    assert caught.value.detail == (
        f"node 0 can open no more files: its limit is {limit} (ulimit -n), and this launch needs up to 314; "
        "run `ulimit -n 314` before pytest; 0 of 30 nodes had an agent here"
    )


def test_full_host_is_named_by_its_own_limit(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with ExitStack() as stack:
        node_zero = coordinator(stack, tmp_path)
        node_zero.spec["join_timeout_s"] = 20.0
        stack.enter_context(socket.create_connection(node_zero.listener.getsockname()))
        monkeypatch.setattr(os, "eventfd", refuse)
        with pytest.raises(NodeFailed, match=r"the host's limit is reached \(sysctl fs.file-max\)"):
            node_zero.join()


@pytest.mark.parametrize("call", ["eventfd", "dup"])
def test_wire_that_can_not_open_its_files_leaves_none(monkeypatch, call):
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(socket.create_connection(listener.getsockname())),
    ):
        before = len(list(Path("/proc/self/fd").iterdir()))
        connection = listener.accept()[0]
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="Too many open files"):
            Wire(connection, b"secret", is_server=True)
        monkeypatch.undo()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
