from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.launch.nodes import wire as wire_module
from pytest_aorta.launch.nodes.wire import MAC_BYTES, MAX_MESSAGE_BYTES, MAX_WAITING, Wire, WireError

VALUES = st.none() | st.integers() | st.text() | st.lists(st.text(), max_size=3)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield node 0's end and the agent's end of one TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as agents,
    ):
        servers, _ = listener.accept()
        with servers:
            yield servers, agents


@contextmanager
def server_wire() -> Iterator[tuple[Wire, socket.socket]]:
    """Yield node 0's wire and the raw socket of whoever has connected."""
    with connected() as (servers, agents):
        server = Wire(servers, b"secret", is_server=True)
        with ExitStack() as stack:
            stack.callback(server.close)
            yield server, agents


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire]]:
    with server_wire() as (server, agents):
        agent = Wire(agents, b"secret", is_server=False)
        with ExitStack() as stack:
            stack.callback(agent.close)
            yield server, agent


def receive(wire: Wire, count: int) -> list[dict[str, Any]]:
    received: list[dict[str, Any]] = []
    while len(received) < count:
        received += wire.receive()
    return received


def sealed(sender: Wire, message: bytes, number: int) -> bytes:
    """Return what ``sender`` would send as its message of this number."""
    return sender._mac(message, number, from_server=sender._is_server) + message


@settings(deadline=None, max_examples=25)
@given(st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=3), min_size=1, max_size=4))
def test_messages_arrive_as_they_were_sent_both_ways(messages):
    with wires() as (server, agent):
        for sender, receiver in ((agent, server), (server, agent)):
            for message in messages:
                sender.send(message)
            assert receive(receiver, len(messages)) == messages


def test_agent_with_another_token_is_refused_by_both_sides():
    with server_wire() as (server, agents):
        with pytest.raises(WireError, match="the other side has a different AORTA_AGENT_TOKEN"):
            Wire(agents, b"another", is_server=False)
        with pytest.raises(WireError, match="the other side has a different AORTA_AGENT_TOKEN"):
            server.receive()


def test_node_zero_that_accepts_any_token_is_not_believed():
    # The impostor welcomes the agent without checking the answer, and can't answer the agent's own challenge.
    def impostor(connection: Connection) -> None:
        connection.send_bytes(b"#CHALLENGE#" + os.urandom(20))
        connection.recv_bytes()
        connection.send_bytes(b"#WELCOME#")
        connection.recv_bytes()
        connection.send_bytes(b"0" * 16)
        with suppress(EOFError, ConnectionError):
            connection.recv_bytes()

    with connected() as (servers, agents), Connection(os.dup(servers.fileno())) as connection:
        thread = threading.Thread(target=impostor, args=(connection,))
        thread.start()
        with pytest.raises(WireError, match="the other side has a different AORTA_AGENT_TOKEN"):
            Wire(agents, b"secret", is_server=False)
        thread.join()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_message_with_any_other_bit_is_refused(data):
    with wires() as (server, agent):
        sent = bytearray(sealed(agent, b'{"type": "heartbeat"}', 0))
        bit = data.draw(st.integers(0, len(sent) * 8 - 1))
        sent[bit // 8] ^= 1 << bit % 8
        agent._connection.send_bytes(sent)
        with pytest.raises(WireError, match="a message was altered or is out of order"):
            server.receive()


def test_message_of_another_connection_is_refused():
    with wires() as (_, agent):
        recorded = sealed(agent, b'{"type": "heartbeat"}', 0)
    with wires() as (server, agent):
        agent._connection.send_bytes(recorded)
        with pytest.raises(WireError, match="altered or is out of order"):
            server.receive()


def test_message_that_comes_twice_is_refused():
    with wires() as (server, agent):
        for _ in range(2):
            agent._connection.send_bytes(sealed(agent, b'{"type": "heartbeat"}', 0))
        assert receive(server, 1) == [{"type": "heartbeat"}]
        with pytest.raises(WireError, match="altered or is out of order"):
            server.receive()


def test_message_sent_back_to_its_sender_is_refused():
    with wires() as (server, agent):
        agent._connection.send_bytes(sealed(server, b'{"type": "plan"}', 0))
        with pytest.raises(WireError, match="altered or is out of order"):
            server.receive()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", b"\xff" * 64, b"\0\0\0\4abcd", b"\x80\0\0\0"]
)
def test_stranger_that_speaks_another_protocol_is_refused(garbage):
    with server_wire() as (server, agents):
        agents.sendall(garbage)
        agents.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError, match=r"larger than this side accepts|different AORTA_AGENT_TOKEN"):
            server.receive()


def test_silent_stranger_does_not_block_node_zero():
    with server_wire() as (server, _):
        began_s = time.monotonic()
        server.close()
        assert time.monotonic() - began_s < 5


def test_silent_node_zero_is_given_up(monkeypatch):
    monkeypatch.setattr(wire_module, "LOST_S", 1.0)
    with connected() as (_, agents), pytest.raises(WireError, match="no answer within 1 s"):
        Wire(agents, b"secret", is_server=False)


def test_message_that_is_too_large_is_refused():
    with wires() as (server, agent):
        agent._socket.sendall((MAC_BYTES + MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(WireError, match="a message is larger than this side accepts"):
            server.receive()


def test_largest_message_arrives():
    text = "x" * (MAX_MESSAGE_BYTES - len('{"data": ""}'))
    with wires() as (server, agent):
        agent.send({"data": text})
        assert receive(server, 1) == [{"data": text}]


def test_half_a_message_does_not_block_node_zero_and_its_end_is_reported():
    with wires() as (server, agent):
        agent._socket.sendall((100).to_bytes(4, "big") + b"half")
        assert select.select([server], [], [], 0.2)[0] == []
        agent.close()
        with pytest.raises(WireError, match="the connection was closed"):
            server.receive()


def test_authenticated_message_that_is_not_json_is_refused():
    with wires() as (server, agent):
        agent._connection.send_bytes(sealed(agent, b"{", 0))
        with pytest.raises(WireError, match="Expecting property name"):
            server.receive()


def test_closed_connection_is_reported_again_and_again():
    with wires() as (server, agent):
        agent.close()
        for _ in range(2):
            with pytest.raises(WireError, match="the connection was closed"):
                server.receive()


def test_messages_before_the_end_of_the_connection_arrive():
    with wires() as (server, agent):
        for number in range(MAX_WAITING):
            agent.send({"number": number})
        agent.close()
        assert [message["number"] for message in receive(server, MAX_WAITING)] == list(range(MAX_WAITING))


def test_wire_with_messages_that_nobody_has_taken_can_be_closed():
    with wires() as (server, agent):
        for number in range(3 * MAX_WAITING):
            agent.send({"number": number})
        server.close()


def send_much(wire: Wire) -> None:
    for _ in range(100):
        wire.send({"data": "x" * (1 << 20)})


def test_sending_to_a_peer_that_does_not_read_ends(monkeypatch):
    monkeypatch.setattr(wire_module, "LOST_S", 1.0)
    # The two sides may greet each other for longer than that on busy cores.
    monkeypatch.setattr(Wire, "_await_greeting", lambda wire: wire._has_greeted.wait(60))
    with connected() as (servers, agents):
        server = Wire(servers, b"secret", is_server=True)
        agent = Wire(agents, b"secret", is_server=False)
        with pytest.raises(WireError, match="the other side has not read for 1 s"):
            send_much(agent)
        server.close()
        agent.close()
