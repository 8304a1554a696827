"""Ports that stay the same from start to start."""

from __future__ import annotations

import errno
import socket
import time

from volunteer_kit.addressing import family_of

CLOSING = 5.0  # s


def is_free(port: int, address: str = "") -> bool:
    """Whether a server could listen there now. `address` "": on all of this machine's, IPv4 and IPv6."""
    found = [_can_bind(family, host, port) for family, host in _binds(address)]
    return False not in found and True in found


def _binds(address: str) -> list[tuple[socket.AddressFamily, str]]:
    if address:
        return [(family_of(address), address)]
    return [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]


def _can_bind(family: socket.AddressFamily, address: str, port: int) -> bool | None:
    """None: this machine has no such address, nor anybody's server on it."""
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
    except OSError as error:
        return None if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) else False
    return True


def gets_free(port: int, address: str = "", within: float = CLOSING) -> bool:
    """Whether it is free, or is so in time: a killed process is seen as gone a little before its sockets are."""
    deadline = time.monotonic() + within
    while not is_free(port, address):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def choose(wanted: int, taken: set[int], address: str = "") -> int:
    """`wanted`, or if somebody has it another one that is free; for the first start, when nobody knows it yet."""
    if wanted not in taken and is_free(wanted, address):
        return wanted
    family, host = next(((f, h) for f, h in _binds(address) if _can_bind(f, h, 0)), (family_of(address), address))
    while True:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        if port not in taken and is_free(port, address):
            return port


def port_of(maddr: str) -> int | None:
    """The TCP port of a multiaddr; None if it has none, 0 if it is any."""
    parts = maddr.split("/")
    if "tcp" not in parts[:-1]:
        return None
    text = parts[parts.index("tcp") + 1]
    return int(text) if text.isdecimal() else None
