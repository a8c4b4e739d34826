"""Addresses, listening sockets and limits of this machine."""

from __future__ import annotations

import errno
import fcntl
import resource
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


def open_files_problem(number: int | None, needed: int) -> str:
    """Return what to do about the error ``number`` of a process that needs ``needed`` open files; "" if unrelated."""
    if number == errno.ENFILE:
        return "node 0 can open no more files: the host's limit is reached (sysctl fs.file-max)"
    if number != errno.EMFILE:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"node 0 can open no more files: its limit is {limit} (ulimit -n), and this launch needs up to {needed}; "
        f"run `ulimit -n {needed}` before pytest"
    )


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
