"""Publish and read manifests, the monitor's signed statements that name a good state.

A rollback order is a message of the nodes (sync/entries.py).

A manifest lies in the DHT as the monitor signed it. In the DHT the entry that lives longer wins, so a manifest's
expiration is signed, and every node refuses it with another one: an old manifest cannot outlive a newer one. A node
also remembers the highest sequence number that it has seen, and a peer that has acted on one keeps it on its disk.

One attack remains: a stranger that controls all nodes that a joiner asks can keep the newest manifest from it. It can
not show it a false one, and a joiner that has been here before does not go back behind the manifest that it knew.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack
from hivemind.dht import DHT
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.logging import get_logger

from volunteer_kit.auth.keys import TokenError, unpack
from volunteer_kit.storage import DamagedFile, keep_aside, read_json, write_whole
from volunteer_kit.swarm.records.signed import MAX_STATEMENT, StatementValidator
from volunteer_kit.swarm.state.agreement import LINEAGE_SIZE, MAX_EPOCH

logger = get_logger(__name__)
ROOT_SIZE = 32  # bytes; BLAKE2b-256
CHUNK_SIZE = 2**20  # bytes; a message to a peer may have two of them
MAX_CHUNK_SIZE = 2**20 + 2**19
MAX_CHUNKS = 2**15  # 32 GB; their hashes are one message of 1 MB
MAX_SEQUENCE = 2**53
LINEAGE_SIZES = (LINEAGE_SIZE, 32)  # bytes; a node's is a SHA-256
MANIFEST_EVERY = 10  # epochs between two manifests, at least; a state's way from the last one is short and its end soon
LIFETIME = 30 * 86_400.0  # s that a statement stays; a run outlives its monitor, and joiners need a base to begin from
CLOCK_SKEW = 60.0  # s
Sign = Callable[[str, bytes], bytes]  # (kind, payload) -> envelope: auth.keys.Signer.sign


class OpensEnvelopes(Protocol):
    """auth.keys.Trust. Goes to the DHT's process, so it must pickle."""

    def open(self, envelope: bytes, kind: str, role: Any, now: float) -> bytes: ...


# --- the statements ---


@dataclass(frozen=True)
class Manifest:
    """A training state that the monitor holds for good, and how to know its bytes.

    :param sequence: counts the manifests of a run; several monitors go on from what they find
    :param order: sequence of the last order to roll back that is in this state; 0: there was none
    :param root: of the hashes of the chunks, see chunk_store.py; it covers epoch, lineage and counters too
    :param created_at: s since 1970
    :param expires_at: s since 1970; when the DHT forgets it. Later than that of the one before
    """

    run_key: str
    epoch: int
    sequence: int
    order: int
    lineage: bytes
    root: bytes
    total_bytes: int
    chunk_size: int
    created_at: float
    expires_at: float

    @property
    def num_chunks(self) -> int:
        return -(-self.total_bytes // self.chunk_size)

    def to_list(self) -> list:
        return [getattr(self, name) for name in _MANIFEST_FIELDS]

    @classmethod
    def from_list(cls, words: list) -> Manifest:
        """Raises TokenError (malformed)."""
        return _checked(cls(*_typed(words, tuple(_MANIFEST_FIELDS.values()))))


_MANIFEST_FIELDS = {
    "run_key": str, "epoch": int, "sequence": int, "order": int, "lineage": bytes, "root": bytes, "total_bytes": int,
    "chunk_size": int, "created_at": float, "expires_at": float,
}  # fmt: skip
KINDS: dict[str, type] = {"manifest": Manifest}  # kind of envelope -> what is in it


def _typed(words: Any, types: tuple[type, ...]) -> list:
    fits = isinstance(words, list) and len(words) == len(types)
    if not fits or any(type(one) is not kind for one, kind in zip(words, types, strict=True)):
        raise TokenError("malformed", "it has other parts than it should")
    return words


def _checked(said: Manifest) -> Manifest:
    times = (said.created_at, said.expires_at)
    fits = 0 < len(said.run_key) <= 256 and 0 < said.sequence < MAX_SEQUENCE
    fits = fits and all(math.isfinite(one) and one >= 0 for one in times) and times[0] < times[1]
    fits = fits and 0 <= said.epoch < MAX_EPOCH and 0 <= said.order < MAX_SEQUENCE
    fits = fits and len(said.lineage) in LINEAGE_SIZES and len(said.root) == ROOT_SIZE
    fits = fits and 2**10 <= said.chunk_size <= MAX_CHUNK_SIZE
    fits = fits and 0 < said.total_bytes <= said.chunk_size * MAX_CHUNKS
    if not fits:
        raise TokenError("malformed", "it says what cannot be")
    return said


def seal(sign: Sign, said: Manifest) -> bytes:
    """The envelope of a statement. Raises TokenError for one that nobody would accept."""
    return sign("manifest", msgpack.packb(_checked(said).to_list()))


def unseal(trust: OpensEnvelopes, kind: str, run_key: str, envelope: Any, now: float) -> Any:
    """A stranger's envelope -> Manifest. Raises TokenError (malformed, forged, expired, other_run)."""
    if not isinstance(envelope, bytes) or len(envelope) > MAX_STATEMENT:
        raise TokenError("malformed", "it is no signed statement")
    payload = trust.open(envelope, kind, "monitor", now)
    words = unpack(payload, tuple(_MANIFEST_FIELDS.values()))
    said = KINDS[kind].from_list(words)
    if said.run_key != run_key:
        raise TokenError("other_run", f"it is for the run {said.run_key[:64]!r}, this is {run_key!r}")
    if said.expires_at < now:
        raise TokenError("expired", "it has expired")
    if said.expires_at > now + 2 * LIFETIME + CLOCK_SKEW:
        raise TokenError("malformed", "it lives longer than any statement may")
    return said


# --- in the DHT ---


def key_of(kind: str, run_key: str) -> str:
    return f"{run_key}_{kind}"


@dataclass(frozen=True)
class _Terms:
    """What the DHT's nodes must know of a statement of this kind."""

    trust: OpensEnvelopes
    run_key: str
    kind: str

    def __call__(self, envelope: bytes) -> tuple[float, int]:
        said = unseal(self.trust, self.kind, self.run_key, envelope, get_dht_time())
        return said.expires_at, said.sequence


def validators(trust: OpensEnvelopes, run_key: str) -> list[StatementValidator]:
    """Of every node of a run: it takes only what the monitor signed."""
    return [StatementValidator(key_of(kind, run_key), _Terms(trust, run_key, kind)) for kind in KINDS]


class Sequences:
    """The highest sequence numbers that this machine has acted on, in a file: a restart must not make it forget.

    :param path: None: in memory only
    """

    def __init__(self, path: str | Path | None = None):
        self._path = None if path is None else Path(path)
        self._highest: dict[str, int] = {}
        try:
            self._highest, reason = read_json(self._path, _sequences) if self._path else ({}, "")
        except FileNotFoundError:  # a new machine
            return
        except DamagedFile as error:
            reason = error.reason
        if reason:
            logger.warning(
                f"What the run's monitor has said up to now cannot be read from {self._path} ({reason})."
                f"{keep_aside(self._path)} Until its next statement an earlier one would be believed here."
            )

    def __getitem__(self, kind: str) -> int:
        return self._highest.get(kind, 0)

    def raise_to(self, kind: str, sequence: int) -> None:
        if sequence <= self[kind]:
            return
        self._highest[kind] = sequence
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._highest))


def _sequences(read: dict) -> tuple[dict[str, int], str]:
    """(those that are sequence numbers, what is wrong with the others). Raises AttributeError for what is no dict."""
    good = {kind: one for kind, one in read.items() if type(one) is int and 0 <= one < MAX_SEQUENCE}
    return good, "" if len(good) == len(read) else f"{', '.join(read.keys() - good.keys())[:100]}: no sequence number"


class Statements:
    """Finds and publishes what the monitor signed. One per process that has a DHT.

    :param sequences: what this machine has acted on already; older ones are not believed
    """

    RENEW_EVERY = 600.0  # s; nodes leave and take their share of the DHT along: who holds a statement stores it again

    def __init__(self, dht: DHT, run_key: str, trust: OpensEnvelopes, sequences: Sequences | None = None):
        self.dht, self.run_key, self.trust = dht, run_key, trust
        self.sequences = sequences or Sequences()
        self._renewed_at: dict[str, float] = {}
        dht.add_validators(validators(trust, run_key))

    def publish(self, sign: Sign, said: Manifest) -> bool:
        """Sign and store. :returns: whether a node took it. Raises TokenError for one that nobody would accept."""
        return bool(self._store("manifest", seal(sign, said), said.expires_at))

    def expiry(self, kind: str, now: float) -> float:
        """The end to sign next: later than that of what stands there, or it would not be replaced."""
        found = self.find(kind)
        return max(now + LIFETIME, found.expires_at + 1 if found is not None else 0.0)

    def next_sequence(self, kind: str) -> int:
        found = self.find(kind)
        return max(self.sequences[kind], found.sequence if found is not None else 0) + 1

    def find(self, kind: str) -> Any:
        """The newest Manifest ("manifest") that is to be believed, or None."""
        return self.read(kind, self.look(kind).result())

    def look(self, kind: str) -> MPFuture:
        """The same without waiting; what the future brings is for read()."""
        return self.dht.get(key_of(kind, self.run_key), latest=True, return_future=True)

    def read(self, kind: str, found: Any) -> Any:
        now = get_dht_time()
        try:
            said = unseal(self.trust, kind, self.run_key, found.value, now) if found is not None else None
        except TokenError as error:
            logger.warning(f"A {kind} in the DHT is not believed: {error}")
            return None
        if said is None or said.sequence < self.sequences[kind]:
            return None
        if time.monotonic() - self._renewed_at.get(kind, -math.inf) > self.RENEW_EVERY:
            self._renewed_at[kind] = time.monotonic()
            self._store(kind, found.value, said.expires_at, wait=False)
        return said

    def _store(self, kind: str, envelope: bytes, expires_at: float, wait: bool = True) -> Any:
        return self.dht.store(
            key_of(kind, self.run_key), value=envelope, expiration_time=expires_at, return_future=not wait
        )
