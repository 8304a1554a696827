"""What can go wrong between peers."""

from __future__ import annotations


class SwarmError(ConnectionError):
    """A swarm cannot be joined or used. Its text says what happened and what to do.

    `kind` is one word for programs (dead_peers, port_taken, clock, identity_taken, wrong_run, shared_memory, startup).
    """

    def __init__(self, message: str, kind: str = "swarm"):
        super().__init__(message)
        self.kind = kind
