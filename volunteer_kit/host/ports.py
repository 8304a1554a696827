"""Ports that stay the same from start to start."""

from __future__ import annotations

import socket
import time

CLOSING = 5.0  # s


def is_free(port: int, address: str = "") -> bool:
    """Whether a server could listen there now. `address` "": on all of this machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
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
    while True:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        if port not in taken:
            return port


def port_of(maddr: str) -> int | None:
    """The TCP port of a multiaddr; None if it has none, 0 if it is any."""
    parts = maddr.split("/")
    if "tcp" not in parts[:-1]:
        return None
    text = parts[parts.index("tcp") + 1]
    return int(text) if text.isdecimal() else None
