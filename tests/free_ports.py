"""Ports that are free, and that the system gives to no other program meanwhile: its own begin at 32768."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(number: int) -> list[int]:
    """So many, each once."""
    found: set[int] = set()
    while len(found) < number:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.add(port)
    return list(found)


def free_port() -> int:
    return free_ports(1)[0]
