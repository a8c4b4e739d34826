"""Messages between pytest and its fork server: one line of JSON each, with file descriptors attached."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_MAX_FDS = 128
_CHUNK_BYTES = 1 << 16


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send ``message`` and duplicates of ``fds``."""
    data = json.dumps(message).encode() + b"\n"
    # Descriptors are sent with the first bytes; a long environment may need further calls.
    sent = socket.send_fds(channel, [data], list(fds)) if fds else 0
    channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its file descriptors, which programs that the process starts do not inherit.

    Raises:
        EOFError: The other side has closed the channel.
    """
    data, fds = b"", list[int]()
    while not data.endswith(b"\n"):
        part, new, _, _ = socket.recv_fds(channel, _CHUNK_BYTES, _MAX_FDS)
        fds += new
        for fd in new:  # Python 3.11 drops the flag MSG_CMSG_CLOEXEC
            os.set_inheritable(fd, False)
        if not part:
            close_all(fds)
            raise EOFError("the other side of the channel is gone")
        data += part
    message: dict[str, Any] = json.loads(data)
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    """Close every one of ``fds``."""
    for fd in fds:
        os.close(fd)
