"""Decide whether a peer may take part, on every call that a stranger makes here and on every call to a stranger.

libp2p authenticates the other side's peer id, and an access token of the run's authority binds that id to an account
for some minutes. So every DHT call carries the caller's token, and nodes show their tokens when they meet
(node/access.py). Without an authority everybody may take part, except accounts that most of the others have convicted
of cheating.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from hivemind.p2p import P2PHandlerError, PeerID

from volunteer_kit.auth.access_token import SKEW, BanList, TokenError, Trust, read_token
from volunteer_kit.swarm.net.access.ban_table import Condemned, key_of_peer
from volunteer_kit.swarm.net.access.token_table import MAX_TOKEN, Known, Roster
from volunteer_kit.swarm.net.fork_context import FORK
from volunteer_kit.swarm.net.surviving_lock import SurvivingLock

CALLS = (
    "ping", "store", "find",  # of the DHT
    "outgoing",  # ours to a DHT node
    "record",  # what somebody has written into the DHT
)  # fmt: skip
REASONS = {
    "no_token": "has shown no access token",
    "malformed": "has shown something that is no access token",
    "forged": "has shown a forged access token",
    "expired": "has shown an access token that has expired",
    "other_run": "has shown another run's access token",
    "other_peer": "has shown another peer's access token",
    "banned": "is banned from this run",
    "convicted": "was caught cheating by the others",
}
SHUT_OUT = ("banned", "convicted")
KINDS = tuple(REASONS)
MAX_SEEN = 4096  # tokens
MAX_UNKNOWN = 4096  # peers; more than write into one record's key, or made-up ones would keep true ones out
RENEW_BEFORE = 120.0  # s before a token's end at which its successor is looked for; it is there since 8 minutes


class NotAdmitted(P2PHandlerError):
    """A call to or from a peer that may not take part. hivemind treats it as that peer's failure, and goes on."""


class Admission:
    """What this peer knows of the others' right to be here; shared by its processes.

    :param trust: the run's root key; None: no authority, everybody may take part
    :param clock: s since 1970
    """

    def __init__(self, trust: Trust | None = None, clock: Callable[[], float] = time.time):
        self.trust, self._clock = trust, clock
        self._roster = Roster() if trust else None
        self._condemned = Condemned()
        # account -> s since 1970: what was found against it until then is set aside. Of the process that keeps the bans
        self.pardons: Mapping[bytes, float] = {}
        self._counts = FORK.Array(ctypes.c_int64, len(CALLS) * len(KINDS), lock=SurvivingLock())
        # of this process: good tokens, which come with each call again; to read one takes longer than the call
        self._seen: dict[bytes, tuple[bytes, Known]] = {}
        self._unknown: dict[PeerID, None] = {}  # of this process: authors of records whose token nobody has shown us

    @property
    def is_open(self) -> bool:
        return self.trust is None

    # --- ourselves ---

    @property
    def own_token(self) -> bytes:
        """What we show; empty in an open run."""
        return self._roster.token if self._roster else b""

    def set_own(self, envelope: bytes) -> None:
        """What the authority gave us, from now on. Raises TokenError for what no other peer would accept."""
        token = read_token(envelope, self.trust, self._clock())
        self._roster.token = envelope
        self._roster.add(token.peer_id, Known(token.account, token.expires_at, token.role, token.username))

    # --- the others ---

    def show(self, envelope: bytes, peer_id: PeerID) -> str | None:
        """A peer shows its token. :returns: why it is not admitted by that, a key of REASONS, or None if it is."""
        if self.is_open:
            return self.reason_to_refuse(peer_id)
        if not envelope:
            return "no_token"
        if len(envelope) > MAX_TOKEN:
            return "malformed"
        seen = self._seen.get(envelope)
        if seen is not None and seen[0] == peer_id.to_bytes() and seen[1].expires_at >= self._clock() - SKEW:
            return self._why_shut_out(seen[1].account)
        try:
            token = read_token(envelope, self.trust, self._clock())
        except TokenError as error:
            return error.kind
        if token.peer_id != peer_id.to_bytes():
            return "other_peer"
        known = Known(token.account, token.expires_at, token.role, token.username)
        self._roster.add(token.peer_id, known)
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[envelope] = (token.peer_id, known)
        return self._why_shut_out(token.account)

    def reason_to_refuse(self, peer_id: PeerID) -> str | None:
        """Why this peer may not take part, by what it has shown; a key of REASONS."""
        if self.is_open:
            condemned = self._condemned.keys
            return "convicted" if condemned and key_of_peer(peer_id.to_bytes()) in condemned else None
        known = self._roster.get(peer_id.to_bytes())
        if known is None:
            return "no_token"
        expired = "expired" if known.expires_at < self._clock() - SKEW else None
        return self._why_shut_out(known.account) or expired

    def _why_shut_out(self, account: bytes) -> str | None:
        if account in self._roster.bans.accounts:
            return "banned"
        return "convicted" if account in self._condemned.keys else None

    def is_admitted(self, peer_id: PeerID) -> bool:
        return self.reason_to_refuse(peer_id) is None

    def knows(self, peer_id: PeerID) -> bool:
        """Has this peer ever shown a good token here, as far as we remember?"""
        return self.is_open or self._roster.get(peer_id.to_bytes()) is not None

    def why_shut_out(self, peer_id: PeerID) -> str | None:
        """One of SHUT_OUT for a peer that must not even be called; None too for one that nobody knows."""
        reason = self.reason_to_refuse(peer_id)
        return reason if reason in SHUT_OUT else None

    def believes(self, peer_id: PeerID) -> bool:
        """Does what this peer has written count? Of one of whom we have seen no token, not before we have: see
        take_unknown."""
        reason = self.reason_to_refuse(peer_id)
        if reason not in SHUT_OUT and self.lacks_token(peer_id) and len(self._unknown) < MAX_UNKNOWN:
            self._unknown[peer_id] = None
        elif reason is not None:
            self.count("record", reason)
        return reason is None

    def lacks_token(self, peer_id: PeerID) -> bool:
        """Have we seen none of this peer, or none that will hold much longer? Looked for only when it has ended, it
        would be missing for a moment, and with it one of the peers that a round waits for."""
        known = self._roster.get(peer_id.to_bytes()) if self._roster else None
        return not self.is_open and (known is None or known.expires_at < self._clock() + RENEW_BEFORE)

    def take_unknown(self) -> list[PeerID]:
        """Whose tokens should be looked for."""
        unknown, self._unknown = self._unknown, {}
        return list(unknown)

    def account_of(self, peer_id: PeerID) -> bytes | None:
        """Digest of the peer's account; without an authority each peer is an account of its own."""
        if self.is_open:
            return peer_id.to_bytes()
        known = self._roster.get(peer_id.to_bytes())
        return known.account if known else None

    def username_of(self, peer_id: PeerID) -> str | None:
        known = self._roster.get(peer_id.to_bytes()) if self._roster else None
        return known.username if known else None

    def role_of(self, peer_id: PeerID) -> str | None:
        """volunteer, monitor or host; None if it is not known or no longer holds."""
        known = self._roster.get(peer_id.to_bytes()) if self._roster and self.is_admitted(peer_id) else None
        return known.role if known else None

    # --- bans ---

    @property
    def bans(self) -> BanList:
        return self._roster.bans if self._roster else BanList()

    def ban(self, bans: BanList) -> None:
        """The authority's list, checked against its signed statement. An older one changes nothing."""
        self._roster.bans = bans
        if bans.version >= self._roster.bans.version:
            self.pardons = bans.pardons

    def condemn(self, peers: Iterable[PeerID]) -> None:
        """Refuse these peers from now on, with all of their accounts, and nobody else whom most others had convicted;
        in place of the authority's word until it comes, or where there is none."""
        peers = list(peers)
        if self.is_open:
            keys = {key_of_peer(peer.to_bytes()) for peer in peers}
        else:
            keys = {account for peer in peers if (account := self.account_of(peer)) is not None}
        self.condemned = frozenset(keys)

    @property
    def condemned(self) -> frozenset[bytes]:
        """Keys of those whom most others have convicted, as `condemn` left them, for another process of this peer."""
        return self._condemned.keys

    @condemned.setter
    def condemned(self, keys: frozenset[bytes]) -> None:
        if keys != self._condemned.keys:
            self._condemned.keys = keys

    def pardoned_at(self, peer_id: PeerID) -> float:
        """When moderators have set aside what was found against this peer's account, s since 1970; 0: never."""
        account = None if self.is_open else self.account_of(peer_id)
        return self.pardons.get(account, 0.0) if account is not None else 0.0

    # --- the door ---

    def check(self, peer_id: PeerID, call: str) -> None:
        """Raises NotAdmitted, and counts, unless `peer_id` may take part in `call`."""
        reason = self.reason_to_refuse(peer_id)
        if reason is not None:
            self.refuse(peer_id, call, reason)

    def refuse(self, peer_id: PeerID, call: str, reason: str) -> None:
        """Raises NotAdmitted, and counts."""
        self.count(call, reason)
        raise NotAdmitted(f"{peer_id} {REASONS[reason]} (refused at {call})")

    def count(self, call: str, reason: str) -> None:
        with self._counts.get_lock():
            self._counts[CALLS.index(call) * len(KINDS) + KINDS.index(reason)] += 1

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """How often (call, reason) was refused, by all processes of this peer."""
        cells = [(call, kind) for call in CALLS for kind in KINDS]
        return Counter({cell: number for cell, number in zip(cells, self._counts, strict=True) if number})
