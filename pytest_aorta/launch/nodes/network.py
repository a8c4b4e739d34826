"""Addresses and listening sockets of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free port.

    Raises:
        OSError: The address is not this machine's, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=512)


def endpoint_text(address: str, port: int) -> str:
    """Return ``HOST:PORT`` as in a URL, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with the IPv4 ``address``; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
