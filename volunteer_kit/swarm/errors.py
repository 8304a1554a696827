"""Define the errors between peers."""

from __future__ import annotations

import reprlib

MAX_WORDS = 200  # characters of what a stranger sent, in a log or an error
_reader = reprlib.Repr()
_reader.maxlevel, _reader.maxstring, _reader.maxother = 2, MAX_WORDS, MAX_WORDS


def brief(value: object) -> str:
    """repr() of an error or of what a stranger sent: one line of MAX_WORDS characters at most, however deep or large
    the value is."""
    return _reader.repr(value)[:MAX_WORDS]


class SwarmError(ConnectionError):
    """A swarm cannot be joined or used. Its text says what happened and what to do.

    `kind` is one word for programs (dead_peers, port_taken, clock, identity_taken, wrong_run, shared_memory, startup).
    """

    def __init__(self, message: str, kind: str = "swarm"):
        super().__init__(message)
        self.kind = kind
