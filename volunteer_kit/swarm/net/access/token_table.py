"""Share one table of access tokens and bans among all processes of this peer.

The DHT lives in a process of its own. Each process learns of tokens by the calls that it gets and makes, and all others
must know them at once, without a question. So the table lies in shared memory that exists before the forks.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from typing import NamedTuple

from volunteer_kit.auth.access_token import MAX_BANS, BanList
from volunteer_kit.swarm.net.fork_context import FORK
from volunteer_kit.swarm.net.surviving_lock import SurvivingLock

CAPACITY = 8192  # peers; 1 MB
PROBES = 64  # places that one peer may have in the table
ENTRY = struct.Struct("<16s16sdB87s")  # peer's digest, account, expiry (s since 1970), role, name: 128 bytes
HEAD = struct.Struct("<16s16sd")  # of an entry
ROLE_NUMBERS = {"volunteer": 0, "monitor": 1, "host": 2}
ROLE_NAMES = tuple(ROLE_NUMBERS)
ACCOUNT = 16  # bytes of an account's digest
MAX_TOKEN = 1024  # bytes


class Known(NamedTuple):
    """What a peer has shown."""

    account: bytes
    expires_at: float  # s since 1970
    role: str
    username: str


class Roster:
    """Made in the process that trains; those that are forked later share it."""

    def __init__(self):
        self._table = FORK.Array(ctypes.c_char, CAPACITY * ENTRY.size, lock=SurvivingLock())
        self._bans = FORK.Array(ctypes.c_char, MAX_BANS * ACCOUNT, lock=SurvivingLock())
        self._num_bans = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._bans_version = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._token = FORK.Array(ctypes.c_char, MAX_TOKEN, lock=SurvivingLock())
        self._token_size = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._banned = BanList()  # as this process last read it

    # --- peers ---

    def add(self, peer_id: bytes, known: Known) -> None:
        """Remember what a peer has shown, in place of what it showed before; or of who expired the longest ago."""
        digest = _digest(peer_id)
        entry = ENTRY.pack(
            digest, known.account, known.expires_at, ROLE_NUMBERS[known.role], known.username.encode()[:87]
        )
        with self._table.get_lock():
            table = self._table.get_obj()
            place, expires_at = self._find(table, digest)
            if place is None:
                places = [self._place(digest, probe) for probe in range(PROBES)]
                place = min(places, key=lambda one: HEAD.unpack_from(table, one)[2])
            elif expires_at >= known.expires_at:
                return  # it is there; or an older token has come by a slower way
            ctypes.memmove(ctypes.addressof(table) + place, entry, ENTRY.size)

    def get(self, peer_id: bytes) -> Known | None:
        """What this peer has shown, expired or not."""
        with self._table.get_lock():
            place, expires_at = self._find(self._table.get_obj(), _digest(peer_id))
            if not expires_at:
                return None
            _, account, _, role, name = ENTRY.unpack_from(self._table.get_obj(), place)
        return Known(account, expires_at, ROLE_NAMES[role], name.rstrip(b"\0").decode(errors="replace"))

    def _find(self, table: ctypes.Array, digest: bytes) -> tuple[int | None, float]:
        """Where this peer is, or would be put, and until when its token holds (0: it is not there); None: all places
        are others'. Every call of the DHT asks this, so it stops at the first place that is free."""
        for probe in range(PROBES):
            place = self._place(digest, probe)
            held, _, expires_at = HEAD.unpack_from(table, place)
            if held == digest or expires_at == 0.0:  # nobody was ever put further
                return place, expires_at
        return None, 0.0

    @staticmethod
    def _place(digest: bytes, probe: int) -> int:
        return (int.from_bytes(digest[:4], "little") + probe) % CAPACITY * ENTRY.size

    # --- bans ---

    @property
    def bans(self) -> BanList:
        """The newest list."""
        if self._banned.version != self._bans_version.value:
            with self._bans.get_lock():
                raw = bytes(self._bans.get_obj()[: self._num_bans.value * ACCOUNT])
                accounts = (raw[i : i + ACCOUNT] for i in range(0, len(raw), ACCOUNT))
                self._banned = BanList(self._bans_version.value, frozenset(accounts))
        return self._banned

    @bans.setter
    def bans(self, bans: BanList) -> None:
        with self._bans.get_lock():
            if bans.version > self._bans_version.value:
                raw = b"".join(sorted(bans.accounts))
                ctypes.memmove(self._bans.get_obj(), raw, len(raw))
                self._num_bans.value, self._bans_version.value = len(bans.accounts), bans.version

    # --- our own token ---

    @property
    def token(self) -> bytes:
        """What this peer shows; empty without one."""
        with self._token.get_lock():
            return bytes(self._token.get_obj()[: self._token_size.value])

    @token.setter
    def token(self, envelope: bytes) -> None:
        """Raises ValueError."""
        if len(envelope) > MAX_TOKEN:
            raise ValueError(f"an access token of {len(envelope)} bytes")
        with self._token.get_lock():
            ctypes.memmove(self._token.get_obj(), envelope, len(envelope))
            self._token_size.value = len(envelope)


def _digest(peer_id: bytes) -> bytes:
    return hashlib.blake2b(peer_id, digest_size=16).digest()
