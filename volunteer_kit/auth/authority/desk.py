"""The authority's desk: who joins, who refreshes, what everybody may read. Knows no HTTP.

A volunteer proves with a signature that the key of his peer is his. What is overheard of that (it passes by TLS) and
sent again within its minute gives a token that binds the same key and peer id as before: to use it one needs the key.
It cannot be sent for another key, because a signature fits one key only; nor with another login, whose hash is signed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sqlalchemy.orm import Session

from volunteer_kit.auth.access_token import (
    AccessToken,
    BanList,
    KeyFolder,
    Signer,
    issue_token,
    key_hash,
    peer_id_of_key,
    sign_bans,
    sign_pardons,
)
from volunteer_kit.auth.authority import accounts
from volunteer_kit.auth.authority.hub_login import who_is
from volunteer_kit.auth.authority.pace import Pacer
from volunteer_kit.auth.authority.settings import Settings
from volunteer_kit.auth.authority.storage import Storage
from volunteer_kit.auth.authority.tables import AccountRow, PeerRow
from volunteer_kit.auth.moderation import Person, Refused, judge
from volunteer_kit.auth.proof import is_proven, join_claim, refresh_claim

KEYS_CACHED = 5.0  # s after which a rotated key is noticed


class Asked(Protocol):
    """What a join and a refresh have in common. `time`: s since 1970 on the volunteer's clock."""

    run_id: str
    public_key: str
    time: int
    proof: str


class Admission(NamedTuple):
    """`join_again`: the account should sign in at the Hub again soon; until it does, this goes on for a day."""

    token: bytes
    expires_at: float
    username: str
    join_again: bool = False


@dataclass(frozen=True)
class Published:
    """The ban list and the authority's word for it, and for its pardons."""

    bans: BanList
    statement: bytes
    pardons: bytes
    signed_at: float


class Desk:
    """Safe to call from many threads. `clock`: s since 1970."""

    def __init__(
        self, settings: Settings, storage: Storage, keys: KeyFolder, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings, self.storage, self.clock = settings, storage, clock
        self.pacer = Pacer(settings.pace)
        self._keys = keys
        self._lock = threading.Lock()
        self._signer: tuple[float, Signer] | None = None
        self._published: Published | None = None

    # --- volunteers ---

    def join(self, asked: Asked, hf_token: str, address: str) -> Admission:
        """Raises Refused."""
        peer_id = self.proven(asked, join_claim(asked.run_id, asked.time, hf_token))
        person = self.ask_hub(hf_token, address)
        self.pacer.take("account", person.account)
        now = self.clock()
        with self.storage.writing() as db:
            accounts.remember_whom_a_ban_means(db, person)
        with self.storage.writing() as db:
            self._let_in(db, person, peer_id, now)
            return self._issue(db, person.name, person.account, peer_id, asked, now)

    def ask_hub(self, hf_token: str, address: str) -> Person:
        """Whose login this is. Raises Refused; who tries tokens is sent away before the Hub is asked."""
        self.pacer.require_some("wrong", address)
        try:
            return who_is(hf_token, self.settings.allowlist, self.settings.oauth_client_id)
        except Refused as error:
            if error.kind in ("wrong", "expired", "malformed"):
                self.pacer.take("wrong", address)
            raise

    def _let_in(self, db: Session, person: Person, peer_id: bytes, now: float) -> None:
        is_member = self.settings.allowlist.has_member(person.orgs)
        standing = accounts.standing(db, person.account, person.hub_id, is_member)
        judge(self.settings.allowlist, person.name, standing, self.settings.help_url)
        peer = db.get(PeerRow, peer_id.hex())
        if peer is not None and peer.account != person.account and accounts.ban_of(db, peer.account):
            raise Refused("banned", "This machine's key belongs to an account that has been banned from this run.")
        accounts.admit(db, person, is_member=is_member, now=now)
        self._require_room(db, person.account, person.name, peer_id, now)

    def _require_room(self, db: Session, account: str, name: str, peer_id: bytes, now: float) -> None:
        """Only with the account's row locked, or two of its machines would take the last place. Raises Refused."""
        if accounts.count_peers(db, account, now, but=peer_id.hex()) >= self.settings.max_peers:
            raise Refused(
                "peers",
                f"{name} has {self.settings.max_peers} machines in this run already, and no more are let in.\n"
                f"1. Stop one of them; its place is free {self.settings.token_lifetime / 60:.0f} minutes later.",
            )

    def refresh(self, asked: Asked) -> Admission:
        """A new token for a peer that joined before; the Hub is not asked. Raises Refused."""
        peer_id = self.proven(asked, refresh_claim(asked.run_id, asked.time))
        self.pacer.take("peer", peer_id.hex())
        now = self.clock()
        with self.storage.writing() as db:
            peer = db.get(PeerRow, peer_id.hex())
            row = peer and db.get(AccountRow, peer.account, with_for_update=True)
            if row is None:
                raise Refused("unknown", "The authority does not know this machine.\n1. Join again.")
            standing = accounts.standing(db, row.account, row.hub_id)
            judge(self.settings.allowlist, row.name, standing, self.settings.help_url)
            age = now - (row.checked_at or 0)
            if age > 2 * self.settings.recheck_after:
                raise Refused("unknown", "The last sign-in at the Hub is too long ago.\n1. Join again.")
            if peer.expires_at <= now:  # its place may be another machine's by now
                self._require_room(db, row.account, row.name, peer_id, now)
            row.seen_at = now
            given = self._issue(db, row.name, row.account, peer_id, asked, now)
            return given._replace(join_again=age > self.settings.recheck_after)

    def _issue(self, db: Session, name: str, account: str, peer_id: bytes, asked: Asked, now: float) -> Admission:
        expires_at = now + self.settings.token_lifetime
        accounts.note_peer(db, peer_id.hex(), account, now, expires_at)
        token = AccessToken(
            username=name,
            peer_id=peer_id,
            key_hash=key_hash(asked.public_key.encode()),
            run_id=self.settings.run_id,
            role="volunteer",
            expires_at=expires_at,
        )
        return Admission(issue_token(self.signer(), token), expires_at, name)

    def proven(self, asked: Asked, claim: bytes) -> bytes:
        """The peer id of whoever asks. Raises Refused (run, clock, proof)."""
        if asked.run_id != self.settings.run_id:
            what = f"This authority is for the run {self.settings.run_id}, and you asked for another.\n"
            raise Refused("run", f"{what}1. Take the newest run file of the run that you want.")
        ahead = asked.time - self.clock()
        if abs(ahead) > self.settings.proof_window:
            way = f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}" if abs(ahead) < 1e9 else "far off"
            what = f"This machine's clock is {way}, seen from the authority."
            raise Refused("clock", f"{what}\n1. Set it by the network: timedatectl set-ntp true\n2. Run it again.")
        key = asked.public_key.encode()
        if not is_proven(key, asked.proof, claim):
            what = "The proof that this key is yours does not fit it.\n1. Update volunteer_kit, and run it again."
            raise Refused("proof", what)
        try:
            return peer_id_of_key(key)
        except ValueError:
            raise Refused("proof", "The peer's key is none that libp2p takes: RSA of 2048 bits or more.") from None

    # --- everybody ---

    def signer(self) -> Signer:
        """The online key; read again now and then, so that it can be rotated while the authority runs."""
        with self._lock:
            now = time.monotonic()
            if self._signer is None or now - self._signer[0] > KEYS_CACHED:
                self._signer = now, self._keys.signer("authority")
            return self._signer[1]

    @property
    def root_public(self) -> str:
        return self._keys.root_public

    def published(self) -> Published:
        """The ban list, with a statement signed a moment ago."""
        now = self.clock()
        known = self._published
        if known is not None and 0 <= now - known.signed_at < self.settings.bans_cached:
            return known
        with self.storage.reading() as db:
            bans = accounts.shut_out(db, self.settings.run_id, now)
        statement = sign_bans(self.signer(), bans, now, now + self.settings.bans_lifetime)
        self._published = Published(bans, statement, sign_pardons(self.signer(), bans), now)
        return self._published

    def bans_changed(self) -> None:
        """A moderator or the swarm did something: the next who asks gets the new list."""
        self._published = None
