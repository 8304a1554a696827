"""Publish signed convictions in the DHT, and count whether most accounts convict a peer.

Members of a group check each other's contributions, and each comes to its verdicts by itself (Gorbunov et al. 2021,
"Secure Distributed Training at Scale", algorithm 4, where a vote of the majority bans). A member that has found enough
against a peer says so here, and all members refuse a peer that more than half of all other accounts have convicted. One
account has one vote, however many machines it has: to convict an innocent peer takes a majority of accounts.

Under one key each signer lists the peers that it convicts, and members fetch the details only if a majority lists a
peer. So a minority can neither convict nor keep the others busy.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.logging import get_logger
from pydantic.v1 import BaseModel, Field, confloat, conint, conlist, constr, validator
from pydantic.v1 import conbytes as _conbytes

from volunteer_kit.auth.access_token import PEER_ID_BYTES
from volunteer_kit.auth.evidence import (
    FORGOTTEN_AFTER,
    MAX_DETAILS,
    MAX_FINDINGS,
    MAX_SIGNERS,
    Cause,
    Evidence,
    Finding,
    Signature,
    check_details,
    is_majority,
    reason_of,
)
from volunteer_kit.swarm.net.fork_safety import LeanDHT
from volunteer_kit.swarm.net.identity import is_peer_id
from volunteer_kit.swarm.records.peer_record import MAX_EPOCH, read_record

logger = get_logger(__name__)
PATIENCE = 20.0  # s for the DHT to give a record
LIFETIME = 1800.0  # s that a conviction stays in the DHT without renewal
MAX_STRIKES = 3  # of one peer by one signer, the newest; a value stays below 4 KB
MAX_ACCUSED = 64  # by one signer at a time, the newest
MAX_FETCHED = 64  # accused whose evidence is fetched at once, those whom most convict
MAX_SIGNING = 2000  # that are looked at; more than a run has members
TOO_EARLY = 60.0  # s ahead of our clock that a strike may be; hivemind lets clocks differ by 3
ROUND_DIGEST_SIZE = 8  # bytes

_Peer = _conbytes(strict=True, min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)
_Count = conint(strict=True, ge=0, le=100_000)


def round_digest(round_id: bytes) -> bytes:
    """Return the digest that stands for a round in a strike."""
    return hashlib.blake2b(round_id, digest_size=ROUND_DIGEST_SIZE).digest()


class Strike(BaseModel):
    """One mismatch that a peer was found to be to blame for.

    :param accused: the peer's id, 34 bytes
    :param epoch: and `round`, the round_digest of the round's id: where it was
    :param cause: a key of evidence.CAUSES, which has the words for it
    :param jurors_for: who confirmed it, and `jurors_against`, of `group_size` members
    :param details: one line for moderators, MAX_DETAILS characters at most, in plain words
    :param at: DHT time, s, when the member came to it
    """

    accused: _Peer
    epoch: conint(strict=True, ge=0, lt=MAX_EPOCH)
    round: _conbytes(strict=True, min_length=ROUND_DIGEST_SIZE, max_length=ROUND_DIGEST_SIZE)
    cause: Cause
    jurors_for: _Count
    jurors_against: _Count
    group_size: _Count
    details: constr(strict=True, max_length=MAX_DETAILS)
    at: confloat(strict=True, ge=0.0, lt=1e12) = Field(default_factory=get_dht_time)

    class Config:
        frozen = True

    @validator("details")
    def _for_people(cls, text: str) -> str:  # noqa: N805  pydantic's validators are class methods
        return check_details(text)

    @property
    def key(self) -> tuple[str, int, bytes]:
        """Equal in what several members say of the same mismatch."""
        return self.cause, self.epoch, self.round


class Conviction(BaseModel):
    """What one signer has found against one peer: under 3 KB."""

    peer_id: bytes
    strikes: conlist(Strike, min_items=1, max_items=MAX_STRIKES)


class Convicted(BaseModel):
    """Whom one signer convicts: peer ids, one after the other."""

    peer_id: bytes
    accused: _conbytes(strict=True, max_length=MAX_ACCUSED * PEER_ID_BYTES)

    @validator("accused")
    def _whole(cls, packed: bytes) -> bytes:  # noqa: N805
        if not all(is_peer_id(one) for one in _unpacked(packed)):
            raise ValueError("these are no peer ids")
        return packed


Said = dict[PeerID, list[Strike]]  # signer -> what it has found against one peer
IsWorthwhile = Callable[[PeerID, Collection[PeerID]], bool]


def is_convicted(accused: bytes, signers: Iterable[bytes], present: Iterable[bytes]) -> bool:
    """Have more than half of all other accounts that take part convicted this one, and two at least?

    :param signers: accounts that convict it; its own, and those that do not take part, have no vote
    :param present: accounts that take part
    """
    others = frozenset(present) - {accused}
    return is_majority(len(frozenset(signers) & others), len(others))


# --- where they lie ---


def index_key(run_key: str) -> str:
    return f"{run_key}_convictions"


def accused_key(run_key: str, accused: PeerID) -> str:
    return f"{run_key}_convicted_{hashlib.blake2b(accused.to_bytes(), digest_size=16).hexdigest()}"


class ConvictionBoard:
    """Stores whom we convict, and reads whom the others do. May be used from several threads.

    :param run_key: of the run's other boards
    """

    def __init__(self, dht: DHT, run_key: str, lifetime: float = LIFETIME):
        self.dht, self.run_key, self.lifetime = dht, run_key, lifetime
        signer = RSASignatureValidator()
        self._own_subkey = signer.local_public_key
        self._own: dict[PeerID, list[Strike]] = {}  # the newest last
        self._stores: dict[str, Future] = {}  # by key, the last of each
        self._busy = threading.Lock()  # held while what is ours changes: one thread publishes, another renews
        dht.add_validators([signer])

    def publish(self, accused: PeerID, strikes: Iterable[Strike]) -> Future | None:
        """We convict this peer, for these strikes, in place of those that we gave before; those are left out that
        moderators have set aside. Waits for nothing.

        :returns: a future of whether it was stored (`retry` looks after it); None if no strike is left
        """
        kept = sorted((one for one in strikes if self._counts(one, accused)), key=lambda one: one.at)[-MAX_STRIKES:]
        if not kept:
            return None
        with self._busy:
            others = {peer: of_peer for peer, of_peer in self._own.items() if peer != accused}
            self._own = dict([*others.items(), (accused, kept)][-MAX_ACCUSED:])
            self._store_index()
            return self._store_strikes(accused)

    def renew(self) -> None:
        """Store ours again, without what was set aside meanwhile; to be called well within `lifetime`."""
        with self._busy:
            if not self._own:
                return
            own = {peer: [one for one in kept if self._counts(one, peer)] for peer, kept in self._own.items()}
            self._own = {peer: kept for peer, kept in own.items() if kept}
            self._store_index()
            for accused in self._own:
                self._store_strikes(accused)

    def retry(self) -> None:
        """Store again what could not be stored: no node of the DHT was reached, or the line was down. To be called
        every few seconds: what the others do not read they do not honour."""
        with self._busy:
            failed = {key for key, future in self._stores.items() if _has_failed(future)}
            self._stores = {key: future for key, future in self._stores.items() if not future.done()}
            if index_key(self.run_key) in failed:
                self._store_index()
            for accused in self._own:
                if accused_key(self.run_key, accused) in failed:
                    self._store_strikes(accused)

    def fetch(self, is_worthwhile: IsWorthwhile = lambda accused, signers: True) -> dict[PeerID, Said]:
        """Accused -> signer -> its strikes, signed by who they say, of signers that may take part.

        :param is_worthwhile: by those who list it, should the evidence against a peer be fetched?
        """
        named = self._fetch_index()
        worthwhile = [accused for accused, signers in named.items() if is_worthwhile(accused, signers)]
        worthwhile.sort(key=lambda accused: (-len(named[accused]), accused.to_bytes()))
        asked = {
            accused: self.dht.get(accused_key(self.run_key, accused), latest=True, return_future=True)
            for accused in worthwhile[:MAX_FETCHED]
        }
        found = {}
        for accused, future in asked.items():
            try:
                said = self._read(accused, future.result(PATIENCE))
            except Exception as e:  # of hivemind's DHT, in its process
                logger.debug(f"What convicts {accused} could not be fetched: {e!r}")
                continue
            if said:
                found[accused] = said
        return found

    # --- within ---

    @property
    def _own_id(self) -> bytes:
        return self.dht.peer_id.to_bytes()

    def _store_index(self) -> None:
        packed = b"".join(peer.to_bytes() for peer in self._own)
        self._store(index_key(self.run_key), Convicted(peer_id=self._own_id, accused=packed))

    def _store_strikes(self, accused: PeerID) -> Future:
        record = Conviction(peer_id=self._own_id, strikes=self._own[accused])
        return self._store(accused_key(self.run_key, accused), record)

    def _store(self, key: str, record: BaseModel) -> Future:
        expires = get_dht_time() + self.lifetime
        future = self.dht.store(key, record.dict(), expires, subkey=self._own_subkey, return_future=True)
        self._stores[key] = future
        return future

    def _fetch_index(self) -> dict[PeerID, set[PeerID]]:
        """Accused -> those who list it."""
        found = self.dht.get(index_key(self.run_key), latest=True, return_future=True).result(PATIENCE)
        named: dict[PeerID, set[PeerID]] = {}
        for subkey, value in _entries(found):
            record = read_record(self.dht, Convicted, subkey, value)
            for accused in map(PeerID, _unpacked(record.accused) if record is not None else ()):
                named.setdefault(accused, set()).add(PeerID(record.peer_id))
        return named

    def _read(self, accused: PeerID, found: ValueWithExpiration | None) -> Said:
        said: Said = {}
        for subkey, value in _entries(found):
            record = read_record(self.dht, Conviction, subkey, value)
            strikes = [s for s in record.strikes if self._counts(s, accused)] if record is not None else []
            if strikes and record.peer_id != accused.to_bytes() and len(said) < MAX_SIGNING:
                said[PeerID(record.peer_id)] = strikes
        return said

    def _counts(self, strike: Strike, accused: PeerID) -> bool:
        """Is it of this peer, neither older than its account's pardon, nor so old that nobody minds, nor to come?"""
        now = get_dht_time()
        pardoned = self.dht.admission.pardoned_at(accused) if isinstance(self.dht, LeanDHT) else 0.0
        is_of_now = max(pardoned, now - FORGOTTEN_AFTER) < strike.at < now + TOO_EARLY
        return strike.accused == accused.to_bytes() and is_of_now


def _has_failed(store: Future) -> bool:
    return store.done() and (store.cancelled() or store.exception() is not None or not store.result())


def _entries(found: ValueWithExpiration | None) -> Iterable[tuple[Any, Any]]:
    entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
    return list(entries)[:MAX_SIGNING]


def _unpacked(packed: bytes) -> list[bytes]:
    return [packed[start : start + PEER_ID_BYTES] for start in range(0, len(packed), PEER_ID_BYTES)]


# --- for people ---


def evidence_of(accused: PeerID, said: Mapping[PeerID, list[Strike]], others: int) -> Evidence:
    """Each mismatch once, as its first signer puts it, those first that most have signed.

    :param said: of one signer for each account
    """
    first: dict[tuple, Strike] = {}
    count: dict[tuple, int] = {}
    for strike in (strike for of_signer in said.values() for strike in of_signer):
        first.setdefault(strike.key, strike)
        count[strike.key] = count.get(strike.key, 0) + 1
    order = sorted(first, key=lambda key: (-count[key], key))[:MAX_FINDINGS]
    findings = [
        Finding(**{**first[key].dict(exclude={"accused", "at"}), "round": first[key].round.hex()}) for key in order
    ]
    signatures = []
    for signer, strikes in said.items():
        places = sorted({order.index(strike.key) for strike in strikes if strike.key in order})
        if places and len(signatures) < MAX_SIGNERS:
            at = max(strike.at for strike in strikes)
            signatures.append(Signature(peer_id=signer.to_bytes().hex(), findings=places, at=at))
    return Evidence(accused=accused.to_bytes().hex(), others=others, findings=findings, signatures=signatures)


def words_of(accused: PeerID, said: Mapping[PeerID, list[Strike]], others: int) -> str:
    """Why a peer was convicted, in one line. The arguments as above."""
    return reason_of(evidence_of(accused, said, others), len(said))
