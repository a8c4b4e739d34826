"""The channel between node 0 and the agents of the other nodes: JSON in frames, each with a proof of the shared token.

A frame is its payload's length (4 bytes), an HMAC-SHA256 and the payload. The HMAC covers the direction, both sides'
nonces and the frame's number, so that nobody without the token can say, repeat, reorder or reflect anything. Nothing
is encrypted. Node 0 speaks first, with its nonce; the agent's first frame brings its own.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
import socket
from typing import Any

TOKEN_VARIABLE = "AORTA_AGENT_TOKEN"  # noqa: S105 - its name
NONCE_BYTES = 16
MAC_BYTES = 32
HEADER_BYTES = 4 + MAC_BYTES
MAX_HELLO_BYTES = 1 << 16
MAX_FRAME_BYTES = 4 << 20
# What one message carries of a file: base64 adds a third.
CHUNK_BYTES = 1 << 20
# Both sides beat this often, and take the other for lost after that long without a word.
BEAT_S = 1.0
LOST_S = 10.0


class WireError(Exception):
    """The other side is gone, has not the token, or says what this side doesn't take."""


class Wire:
    """One connection. ``is_server`` is node 0's side, which has accepted it.

    Raises:
        WireError: from every method, where the connection is of no use any more.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, is_server: bool) -> None:
        self.connection = connection
        self._token = token
        self._is_server = is_server
        self._nonces = [b"", b""]
        self._sent = self._received = 0
        self._buffer = bytearray()
        connection.settimeout(LOST_S)
        self.peer = str(connection.getpeername()[0])
        if is_server:
            self._nonces[0] = os.urandom(NONCE_BYTES)
            self._send_all(self._nonces[0])
        else:
            self._nonces = [self._read_exactly(NONCE_BYTES), os.urandom(NONCE_BYTES)]

    @property
    def address(self) -> str:
        """This side's own address."""
        return str(self.connection.getsockname()[0])

    def fileno(self) -> int:
        """For ``select``."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; the agent's first one takes its nonce along."""
        if self._sent == 0 and not self._is_server:
            message = message | {"nonce": encode(self._nonces[1])}
            payload = json.dumps(message).encode()
            mac = self._mac(from_server=False, number=0, payload=payload, with_both=False)
        else:
            payload = json.dumps(message).encode()
            mac = self._mac(from_server=self._is_server, number=self._sent, payload=payload)
        self._sent += 1
        self._send_all(len(payload).to_bytes(4, "big") + mac + payload)

    def receive(self) -> list[dict[str, Any]]:
        """Whole messages among what has come; blocks only where nothing has."""
        try:
            part = self.connection.recv(1 << 16)
        except OSError as error:
            raise _gone(error) from None
        if not part:
            raise WireError("the connection was closed")
        self._buffer += part
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < HEADER_BYTES:
            return None
        is_hello = self._is_server and self._received == 0
        size = int.from_bytes(self._buffer[:4], "big")
        if size > (MAX_HELLO_BYTES if is_hello else MAX_FRAME_BYTES):
            raise WireError(f"a message of {size:,} bytes, which is too large")
        if len(self._buffer) < HEADER_BYTES + size:
            return None
        mac, payload = bytes(self._buffer[4:HEADER_BYTES]), bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + size])
        del self._buffer[: HEADER_BYTES + size]
        expected = self._mac(
            from_server=not self._is_server, number=self._received, payload=payload, with_both=not is_hello
        )
        if not hmac.compare_digest(mac, expected):
            raise WireError(f"the other side's {TOKEN_VARIABLE} is another one")
        self._received += 1
        # Whoever has the token writes our own messages.
        message: dict[str, Any] = json.loads(payload)
        if is_hello:
            self._nonces[1] = decode(message.pop("nonce"))
        return message

    def _mac(self, *, from_server: bool, number: int, payload: bytes, with_both: bool = True) -> bytes:
        nonces = self._nonces[0] + (self._nonces[1] if with_both else b"")
        place = b"%s %d %d " % (b"server" if from_server else b"agent", number, len(nonces))
        return hmac.digest(self._token, place + nonces + payload, "sha256")

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        try:
            while len(data) < size:
                part = self.connection.recv(size - len(data))
                if not part:
                    raise WireError("the connection was closed")
                data += part
        except OSError as error:
            raise _gone(error) from None
        return data

    def _send_all(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise _gone(error) from None


def _gone(error: OSError) -> WireError:
    # Closed with words unread, a connection is reset; to whoever reads about it that is the same.
    return WireError("the connection was closed" if isinstance(error, ConnectionError) else str(error))


def encode(data: bytes) -> str:
    """Bytes as JSON text."""
    return base64.b64encode(data).decode("ascii")


def decode(text: object) -> bytes:
    """The bytes of :func:`encode`'s text.

    Raises:
        WireError: it is none.
    """
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise WireError(f"not base64: {error}") from None
