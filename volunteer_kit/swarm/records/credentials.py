"""Refresh the tokens of other peers, the list of bans, and this peer's own token in the DHT.

The DHT holds each peer's token under its peer id, and a signed statement of the authority that names the newest list of
bans. A peer fetches the list itself from any source, and believes it if it is the signed one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from hivemind.utils.logging import get_logger

from volunteer_kit.auth.access_token import BanList, TokenError, Trust, read_bans_statement, read_token
from volunteer_kit.swarm.net.identity import peer_id_of_owner
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.records.signed import StatementBoard

logger = get_logger(__name__)
LOOK_EVERY = 0.5  # s between looks for whom we do not know
BANS_EVERY = 10.0  # s; a ban takes this, what the authority's own keeper needs, and one fetch of the list
LEADER_EVERY = 5.0  # s; of the host's and the monitor's keeper, which ask the authority itself
# s, one of these: age of the newest statement in the DHT from which on a peer asks the authority itself. The first that
# does tells the others; so there are not many, and bans arrive within a minute although no host and no monitor is there
SILENCE = (20.0, 40.0)
ASKED_AT_ONCE = 32
ANSWER_WITHIN = 10.0  # s
TELL_EVERY = 60.0  # s; nodes that have our token leave, and the one time that it was stored may have failed
PAUSES = (1.0, 30.0)  # s until a token that was not found is looked for again; at first, and after several times

# newest version known, None for a fresh word in any case -> the list and its statement, None if it is that version's
FetchBans = Callable[[int | None], tuple[BanList, bytes] | None]


@dataclass(frozen=True)
class _BansTerms:
    trust: Trust

    def __call__(self, envelope: bytes) -> tuple[float, int]:
        statement = read_bans_statement(envelope, self.trust, time.time())
        return statement.expires_at, statement.version


class AdmissionKeeper:
    """Two threads in the process that has started the peer: an authority that answers slowly delays nothing but bans.

    :param fetch_bans: asks the authority over HTTP; raises OSError when it cannot be reached
    :param leads: ask it in any case, and tell the DHT; for host and monitor
    :param on_bans: told of each new list
    """

    def __init__(
        self,
        peer: Peer,
        fetch_bans: FetchBans | None = None,
        *,
        leads: bool = False,
        on_bans: Callable[[BanList], None] | None = None,
        bans_every: float = BANS_EVERY,
    ):
        self._dht, self._admission, self._fetch = peer.dht, peer.admission, fetch_bans
        self._leads, self._on_bans = leads, on_bans
        self._bans_every = min(bans_every, LEADER_EVERY) if leads else bans_every
        self._trust = peer.admission.trust
        signer = RSASignatureValidator()
        self._dht.add_validators([signer])
        self._subkey, self._own_id = signer.local_public_key, peer.peer_id
        self._board = StatementBoard(self._dht, f"{self._trust.run_id}_bans", _BansTerms(self._trust))
        self._issued_at = 0.0  # s since 1970: of the newest statement that we have seen
        self._silence = random.uniform(*SILENCE)
        self._pauses: dict[PeerID, tuple[float, float]] = {}  # looked for in vain -> not before, and the pause
        self._stop = threading.Event()
        self.publish(self._admission.own_token)
        self._threads = [
            threading.Thread(target=self._repeat, args=args, name=f"admission-{args[0].__name__}", daemon=True)
            for args in ((self._look_at_tokens, LOOK_EVERY), (self._look_at_bans, self._bans_every))
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, envelope: bytes) -> None:
        """Our token, a new one: show it from now on, and let it be found under our peer id."""
        self._admission.set_own(envelope)
        self._tell()

    def _tell(self) -> None:
        envelope, self._told_at = self._admission.own_token, time.monotonic()
        try:
            expires_at = read_token(envelope, self._trust, time.time()).expires_at
        except TokenError:
            return  # it has ended, and the authority is away
        key = token_key(self._trust.run_id, self._own_id)
        self._dht.store(key, envelope, expires_at, subkey=self._subkey, return_future=True)

    def close(self) -> None:
        self._stop.set()
        until = time.monotonic() + ANSWER_WITHIN
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _repeat(self, look: Callable[[], None], every: float) -> None:
        while not self._stop.is_set():
            try:
                look()
            except Exception:
                if not self._stop.is_set():
                    logger.exception("The keeper of admissions stumbled")
            self._stop.wait(every)

    # --- tokens ---

    def _look_at_tokens(self) -> None:
        if time.monotonic() - self._told_at > TELL_EVERY:
            self._tell()
        self._look_for(self._admission.take_unknown())

    def _look_for(self, unknown: list[PeerID]) -> None:
        """A few at a time, those who were looked for in vain less and less often: anybody can make up peers."""
        now = time.monotonic()
        self._pauses = {peer: (at, pause) for peer, (at, pause) in self._pauses.items() if now < at + PAUSES[1]}
        due = [peer for peer in unknown if self._pauses.get(peer, (now,))[0] <= now]
        chosen = random.sample(due, min(len(due), ASKED_AT_ONCE))
        asked: dict[PeerID, Future] = {
            peer: self._dht.get(token_key(self._trust.run_id, peer), latest=True, return_future=True) for peer in chosen
        }
        deadline = time.monotonic() + ANSWER_WITHIN
        for peer, answer in asked.items():
            try:
                found = answer.result(timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:
                logger.debug(f"No token of {peer}: {error!r}")
                continue
            for envelope in shown_by(peer, found):
                self._admission.show(envelope, peer)
        for peer in chosen:
            if self._admission.lacks_token(peer):
                pause = min(PAUSES[1], 2 * self._pauses[peer][1] if peer in self._pauses else PAUSES[0])
                self._pauses[peer] = time.monotonic() + pause, pause
            else:
                self._pauses.pop(peer, None)

    # --- bans ---

    def _look_at_bans(self) -> None:
        envelope, statement = self._board.fetch(), None
        if envelope is not None:
            try:
                statement = read_bans_statement(envelope, self._trust, time.time())
                self._issued_at = max(self._issued_at, statement.issued_at)
            except TokenError as error:
                logger.debug(f"A statement about bans that is none: {error}")
        known = self._admission.bans.version
        is_newer = statement is not None and statement.version > known
        # by when it was signed: an old one that is good for two minutes is no word that nobody was banned since
        is_silent = time.time() - self._issued_at > self._silence
        if self._fetch is None or not (is_newer or is_silent or self._leads):
            return
        try:  # leading, or in silence, a fresh word on the same list is wanted too
            answer = self._fetch(None if self._leads or is_silent else known)
        except OSError as error:
            logger.info(f"The authority does not say who is banned: {error!r}")
            return
        if answer is not None:
            self._take(*answer)

    def _take(self, bans: BanList, envelope: bytes) -> None:
        try:
            statement = read_bans_statement(envelope, self._trust, time.time())
        except TokenError as error:
            logger.warning(f"A list of bans that the authority has not signed: {error}")
            return
        if not bans.matches(statement):
            logger.warning("A list of bans that is another than the authority has signed")
            return
        self._issued_at = max(self._issued_at, statement.issued_at)
        is_new = bans.version > self._admission.bans.version
        self._admission.ban(bans)
        self._board.store(envelope)
        if is_new and self._on_bans is not None:
            self._on_bans(bans)


def token_key(run_id: str, peer_id: PeerID) -> str:
    """Where the DHT has a peer's token."""
    return f"{run_id}_token_{peer_id}"


def shown_by(peer_id: PeerID, found: ValueWithExpiration | None) -> list[bytes]:
    """What a peer itself, and nobody else, has stored under its token_key."""
    entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
    return [
        entry.value
        for subkey, entry in entries
        if isinstance(subkey, bytes) and isinstance(entry, ValueWithExpiration) and isinstance(entry.value, bytes)
        if peer_id_of_owner(subkey) == peer_id
    ]
