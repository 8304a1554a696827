"""Share one table of convicted accounts among all processes of this peer, as token_table.py shares tokens."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

from volunteer_kit.swarm.net.fork_context import FORK

CAPACITY = 1024  # accounts; a run without an authority has no better cure against so many than to get one
KEY = 16  # bytes


class Condemned:
    """A set of keys of 16 bytes. Made in the process that trains; those that are forked later share it."""

    def __init__(self):
        self._table = FORK.Array(ctypes.c_char, CAPACITY * KEY)
        self._count = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._version = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._read: tuple[int, frozenset[bytes]] = (0, frozenset())  # as this process last read it

    @property
    def keys(self) -> frozenset[bytes]:
        if self._read[0] != self._version.value:
            with self._table.get_lock():
                raw = bytes(self._table.get_obj()[: self._count.value * KEY])
                self._read = self._version.value, frozenset(raw[i : i + KEY] for i in range(0, len(raw), KEY))
        return self._read[1]

    @keys.setter
    def keys(self, keys: Iterable[bytes]) -> None:
        raw = b"".join(sorted(set(keys))[:CAPACITY])
        with self._table.get_lock():
            ctypes.memmove(self._table.get_obj(), raw, len(raw))
            self._count.value = len(raw) // KEY
            self._version.value += 1


def key_of_peer(peer_id: bytes) -> bytes:
    """Where there are no accounts."""
    return hashlib.blake2b(peer_id, digest_size=KEY).digest()
