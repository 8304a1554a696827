"""Ports that stay the same from start to start."""

from __future__ import annotations

import socket
import time

from volunteer_kit.addressing import LACKS_FAMILY, addresses_of, family_of

CLOSING = 5.0  # s


def is_free(port: int, address: str = "") -> bool:
    """Whether a server could listen there now. `address` "": on all of this machine's, IPv4 and IPv6."""
    try:
        found = [_can_bind(host, port) for host in addresses_of(address)]
    except OSError:  # a name that is not known
        return False
    return False not in found and True in found


def _can_bind(address: str, port: int) -> bool | None:
    """None: this machine has no such address, nor anybody's server on it."""
    family = family_of(address)
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
    except OSError as error:
        return None if error.errno in LACKS_FAMILY else False
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
    host = next((one for one in addresses_of(address) if _can_bind(one, 0)), address)
    while True:
        with socket.socket(family_of(host)) as probe:
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
