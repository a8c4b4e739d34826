"""Authenticated JSON messages between node 0 and the node agents.

Framing and the mutual challenge with the shared token come from ``multiprocessing.connection``; nothing is pickled.
After the challenge both sides exchange nonces, and every message carries an HMAC-SHA256 that covers its direction and
its number on this connection, so that nobody without the token can inject, repeat, reorder or reflect a message.
Nothing is encrypted.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, Queue
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.documents import UnreadableFile, parse_json
from pytest_aorta.common.text import brief

NONCE_BYTES = 16
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 4 << 20
# The part of a file that one message carries; base64 adds a third.
CHUNK_BYTES = 1 << 20
# Each side sends a heartbeat every HEARTBEAT_S, and gives the other side up after LOST_S without a message.
HEARTBEAT_S = 1.0
LOST_S = 10.0
# Limit of messages that were received and not yet taken; the sender waits at the limit.
MAX_WAITING = 8


class WireError(Exception):
    """The other side is gone, has a different token, or has sent an invalid message."""


class WrongToken(WireError):
    """The other side has a different token."""


class Wire:
    """One connection, which a thread of its own authenticates and reads, so that no peer can block the caller.

    Args:
        connection: A connected TCP socket, which the wire owns from now on.
        token: The shared secret.
        is_server: True on node 0, which has accepted the connection. A node agent waits here until both sides have
            proven the token, at most ``LOST_S`` seconds; node 0 learns the result from :meth:`receive`.

    Raises:
        OSError: This process can't open more files, or the other side has closed the connection already.
        WireError: The connection can't be used any more. Every method raises this error.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, is_server: bool) -> None:
        self._socket = connection
        self._token = token
        self._is_server = is_server
        self._key = b""
        self._sent = self._received = 0
        self._waiting: Queue[dict[str, Any]] = Queue(MAX_WAITING)
        self._failure: WireError | None = None
        self._is_closed = False
        self._has_greeted = threading.Event()
        with ExitStack() as undo:
            undo.callback(connection.close)
            self.peer = str(connection.getpeername()[0])
            self._event = os.eventfd(0)
            undo.callback(os.close, self._event)
            # A Connection reads and writes the plain descriptor: the socket has to block, and the kernel enforces the
            # limit.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(LOST_S), 0))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = undo.enter_context(Connection(os.dup(connection.fileno())))
            self._reader = threading.Thread(target=self._read, name="aorta-wire", daemon=True)
            self._reader.start()
            undo.pop_all()
        if not is_server:
            self._await_greeting()

    @property
    def is_authenticated(self) -> bool:
        """True once both sides have proven the token, while the connection works."""
        return self._has_greeted.is_set() and self._failure is None

    @property
    def address(self) -> str:
        """This side's own address."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`receive` returns at once."""
        return self._event

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; blocks while the other side does not read, about ``LOST_S`` seconds at most."""
        payload = json.dumps(message).encode()
        mac = self._mac(payload, self._sent, from_server=self._is_server)
        self._sent += 1
        try:
            self._connection.send_bytes(mac + payload)
        except OSError as error:
            raise _wire_error(error) from None

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; blocks while there are none."""
        os.eventfd_read(self._event)
        # Read before the queue is emptied: messages that arrived before the failure come first.
        failure = self._failure
        messages = self._take_all()
        if failure is not None:
            os.eventfd_write(self._event, 1)
            if not messages:
                raise failure
        return messages

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        while self._reader.is_alive():
            self._take_all()  # the reader may be waiting for room
            self._reader.join(0.01)
        self._connection.close()
        self._socket.close()
        os.close(self._event)

    def _await_greeting(self) -> None:
        if not self._has_greeted.wait(LOST_S):
            self._failure = WireError(f"no answer within {LOST_S:g} s")
        if failure := self._failure:
            self.close()
            raise failure

    def _read(self) -> None:
        try:
            self._greet()
            self._has_greeted.set()
            while not self._is_closed:
                self._waiting.put(self._next_message())
                os.eventfd_write(self._event, 1)
        except (WireError, AuthenticationError, AssertionError, EOFError, OSError, ValueError) as error:
            self._failure = error if isinstance(error, WireError) else _wire_error(error)
        self._has_greeted.set()
        os.eventfd_write(self._event, 1)

    def _greet(self) -> None:
        """Prove the token to each other, and agree on this connection's key."""
        steps = (deliver_challenge, answer_challenge) if self._is_server else (answer_challenge, deliver_challenge)
        for step in steps:
            step(self._connection, self._token)
        own = os.urandom(NONCE_BYTES)
        self._connection.send_bytes(own)
        other = self._connection.recv_bytes(NONCE_BYTES)
        nonces = own + other if self._is_server else other + own
        self._key = hmac.digest(self._token, nonces, "sha256")

    def _next_message(self) -> dict[str, Any]:
        data = self._connection.recv_bytes(MAC_BYTES + MAX_MESSAGE_BYTES)
        mac, payload = data[:MAC_BYTES], data[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload, self._received, from_server=not self._is_server)):
            raise WireError("a message was altered or is out of order")
        self._received += 1
        return parse_message(payload)

    def _mac(self, payload: bytes, number: int, *, from_server: bool) -> bytes:
        prefix = b"%s %d " % (b"server" if from_server else b"agent", number)
        return hmac.digest(self._key, prefix + payload, "sha256")

    def _take_all(self) -> list[dict[str, Any]]:
        messages = []
        with suppress(Empty):
            while True:
                messages.append(self._waiting.get_nowait())
        return messages


def _wire_error(error: Exception) -> WireError:
    if isinstance(error, AuthenticationError | AssertionError):
        return WrongToken(f"the other side has a different {variables.AGENT_TOKEN}")
    if isinstance(error, BlockingIOError):
        return WireError(f"the other side has not read for {LOST_S:g} s")
    text = str(error)
    if text == "bad message length":
        return WireError("a message is larger than this side accepts")
    # A connection that is closed with data unread is reset, which means the same to a user.
    if isinstance(error, EOFError | ConnectionError) or text in ("got end of file during message", "handle is closed"):
        return WireError("the connection was closed")
    return WireError(text)


def parse_message(payload: bytes) -> dict[str, Any]:
    """Return the message in ``payload``.

    Raises:
        WireError: The payload is not an object of strict JSON.
    """
    try:
        message = parse_json(payload.decode("utf-8"), "message")
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {error}") from None
    if not isinstance(message, dict):
        raise WireError(f"malformed message: got {brief(repr(message))}, allowed is an object")
    return message


def encode(data: bytes) -> str:
    """Return bytes as JSON text."""
    return base64.b64encode(data).decode("ascii")


def decode(text: object) -> bytes:
    """Return the bytes of :func:`encode`'s text.

    Raises:
        WireError: The text is not base64.
    """
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"not base64: {error}") from None
