from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.launch.nodes.wire import HEADER_BYTES, MAX_HELLO_BYTES, NONCE_BYTES, Wire, WireError

VALUES = st.none() | st.integers() | st.text() | st.lists(st.text(), max_size=3)
NAMES = st.text(max_size=8).filter(lambda name: name != "nonce")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Node 0's end and the agent's of one TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as agents,
    ):
        servers, _ = listener.accept()
        with servers:
            yield servers, agents


@contextmanager
def wires(agents_token: bytes = b"secret") -> Iterator[tuple[Wire, Wire]]:
    with connected() as (servers, agents):
        server = Wire(servers, b"secret", is_server=True)
        yield server, Wire(agents, agents_token, is_server=False)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent_both_ways(messages):
    with wires() as (server, agent):
        for sender, receiver in ((agent, server), (server, agent)):
            for message in messages:
                sender.send(message)
            received = []
            while len(received) < len(messages):
                received += receiver.receive()
            assert received == messages


def test_other_token_is_refused():
    with wires(b"another") as (server, agent):
        agent.send({"type": "hello"})
        with pytest.raises(WireError, match="AORTA_AGENT_TOKEN is another one"):
            server.receive()


def test_node_zero_without_the_token_is_not_believed():
    with wires(b"another") as (server, agent):
        agent.send({"type": "hello"})
        server._nonces[1] = agent._nonces[1]
        server.send({"type": "plan"})
        with pytest.raises(WireError, match="AORTA_AGENT_TOKEN is another one"):
            agent.receive()


def frame(message: dict) -> bytes:
    """What an agent that has said hello sends, on a connection of its own."""
    with wires() as (server, agent):
        agent.send({"type": "hello"})
        server.receive()
        agent.send(message)
        return server.connection.recv(1 << 16)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_frame_with_any_other_bit_is_refused(data):
    with connected() as (servers, agents):
        server, agent = Wire(servers, b"secret", is_server=True), Wire(agents, b"secret", is_server=False)
        agent.send({"type": "hello"})
        sent = bytearray(servers.recv(1 << 16))
        # Of the length, only what leaves the frame whole: a longer one is waited for.
        bit = data.draw(st.integers(4 * 8, len(sent) * 8 - 1))
        sent[bit // 8] ^= 1 << bit % 8
        agents.sendall(sent)
        with pytest.raises(WireError):
            server.receive()


def test_frame_of_another_connection_is_refused():
    recorded = frame({"type": "beat"})
    with wires() as (server, agent):
        agent.send({"type": "hello"})
        server.receive()
        agent.connection.sendall(recorded)
        with pytest.raises(WireError, match="is another one"):
            server.receive()


def test_frame_that_comes_twice_is_refused():
    with wires() as (server, agent):
        agent.send({"type": "hello"})
        server.receive()
        agent.send({"type": "beat"})
        sent = server.connection.recv(1 << 16)
        agent.connection.sendall(sent + sent)
        with pytest.raises(WireError, match="is another one"):
            server.receive()


def test_frame_sent_back_to_its_sender_is_refused():
    with wires() as (server, agent):
        agent.send({"type": "hello"})
        server.receive()
        server.send({"type": "plan"})
        agent.connection.sendall(agent.connection.recv(1 << 16))
        with pytest.raises(WireError, match="is another one"):
            server.receive()


def test_stranger_can_not_have_much_stored():
    with connected() as (servers, agents):
        server = Wire(servers, b"secret", is_server=True)
        assert len(agents.recv(NONCE_BYTES)) == NONCE_BYTES
        agents.sendall((MAX_HELLO_BYTES + 1).to_bytes(4, "big") + b"\0" * (HEADER_BYTES - 4))
        with pytest.raises(WireError, match="too large"):
            server.receive()


def test_closed_connection_is_told():
    with wires() as (server, agent):
        agent.close()
        with pytest.raises(WireError, match="the connection was closed"):
            server.receive()
