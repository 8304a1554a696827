"""Ports that stay a process's own while it is away."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)  # the system gives others to connections, which may hold one when its owner comes back


def lasting_port() -> int:
    """A TCP port of loopback that nobody has now."""
    drawn = random.SystemRandom()  # two benchmarks at once draw others
    while True:
        port = drawn.choice(PORTS)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
