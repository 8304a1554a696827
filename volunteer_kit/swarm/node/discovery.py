"""Find the other peers of a run, and decide which peer begins it.

Each peer writes a short signed record into the DHT: whether it can be called, and at which epoch it is. A peer without
parameters joins those that have some. If no peer has any, the public peers that wait take turns, in the order of
their ids, and the first one begins. It says so in its record at once, since its node may take seconds to begin. Two
peers that begin at the same moment cost nothing but a snapshot: of two beginnings the one with more samples wins
(`Head.beats`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from pydantic.v1 import BaseModel, StrictBool, conint

from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.node.access import account_name
from volunteer_kit.swarm.node.link import Link
from volunteer_kit.swarm.node.talk import Found, Seen
from volunteer_kit.swarm.records.device_speeds import Limits
from volunteer_kit.swarm.records.peer_record import MAX_EPOCH, MAX_PEERS, read_record

logger = logging.getLogger(__name__)

LIFETIME: Final = 90.0  # s that a record stays without renewal
RENEWED_EVERY: Final = 30.0  # s
LOOK_EVERY: Final = 0.5  # s, while this peer has no parameters
LOOK_LATER: Final = 60.0  # s, once it has: who comes calls the members, and a look brings 5 kB from each of four peers
LOOK_ALONE: Final = 5.0  # s, once it has and knows nobody: it may have begun a second run, unseen by the first
SETTLE: Final = 8.0  # s until a claim is seen by all that claim as well, over a DHT that is slow now and then
TURN: Final = 15.0  # s that a peer has to begin, before the next one does
WORDS: Final = "nodes"  # the board's name under the run's key


class NodeRecord(BaseModel):
    """One node, by its own account."""

    peer_id: bytes
    epoch: conint(strict=True, ge=-1, lt=MAX_EPOCH)  # type: ignore[valid-type]  # -1: it has no parameters yet
    public: StrictBool


class NodesSchema(BaseModel):
    """The board."""

    nodes: dict[BytesWithPublicKey, NodeRecord | None]


def may_begin(me: str, waiting: Iterable[str], waited: float, settle: float = SETTLE, turn: float = TURN) -> bool:
    """Whether this peer begins the run, where nobody has parameters.

    :param waiting: public peers that have none either, by id
    :param waited: s since this peer's claim could be read
    """
    rank = sorted({me, *waiting}).index(me)
    return waited >= settle + rank * turn


def seen_of(
    others: Mapping[PeerID, NodeRecord],
    username_of: Callable[[PeerID], str | None],
    speeds: Limits,
    me: PeerID,
) -> Seen:
    """Those that have parameters, each under the account that its access token proves.

    :param speeds: samples/s that each peer is believed to do
    """

    def speed(peer: PeerID) -> float:
        believed = speeds.of(peer)
        return inf if believed is None else believed

    here = sorted((str(peer), peer, record.public) for peer, record in others.items() if record.epoch >= 0)
    return Seen(
        tuple((name, account_name(username_of(peer) or ""), public, speed(peer)) for name, peer, public in here),
        speed(me),
    )


class Discovery:
    """Tells the node who is here, in a thread of its own.

    :param public: whether others can call this peer
    :param is_first: whether this peer was given no first peers: it waits for nobody
    :param username_of: of a peer's access token; None: it is not known, or there is no authority
    :param believe: samples/s that each peer is believed to do; may take seconds. None: whatever it says
    """

    def __init__(
        self,
        dht: DHT,
        link: Link,
        run_key: str,
        *,
        public: bool,
        is_first: bool = False,
        username_of: Callable[[PeerID], str | None] = lambda peer: None,
        believe: Callable[[], Limits] | None = None,
    ):
        self._dht, self._link, self._key = dht, link, f"{run_key}_{WORDS}"
        self._public, self._is_first = public, is_first
        self._username_of, self._believe = username_of, believe
        signer = RSASignatureValidator()
        self._own_subkey = signer.local_public_key
        dht.add_validators([SchemaValidator(NodesSchema, prefix=run_key), signer])
        self.others: dict[PeerID, NodeRecord] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    @property
    def uncallable(self) -> int:
        """Others that are here while nobody can be called, neither they nor this peer."""
        if self._public or any(record.public for record in list(self.others.values())):
            return 0
        return len(self.others)

    def close(self) -> None:
        """Take the record back, and end."""
        self._stop.set()
        self._thread.join(timeout=10)
        until = get_dht_time() + LIFETIME
        with suppress(SwarmError):  # the DHT's process has died
            self._dht.store(self._key, subkey=self._own_subkey, value=None, expiration_time=until, return_future=True)

    def _run(self) -> None:
        claimed: float | None = None  # s, of time.monotonic()
        has_begun = False  # the node was told to begin the run; it may take seconds until it has
        told: Seen | None = None
        renewed = looked = float("-inf")
        while not self._stop.is_set():
            try:
                epoch = max(self._epoch(), 0 if has_begun else -1)
                now = time.monotonic()
                if now - renewed >= RENEWED_EVERY or (claimed is None):
                    self._publish(epoch)
                    renewed, claimed = now, claimed or time.monotonic()
                if epoch < 0 or now - looked >= (LOOK_LATER if self.others else LOOK_ALONE):
                    self.others, looked = self._fetch(), now
                speeds = self._believe() if self._believe is not None else Limits()
                seen = seen_of(self.others, self._username_of, speeds, self._dht.peer_id)
                if seen.peers and seen != told:
                    told = seen
                    self._link.send(seen)
                if epoch < 0 and not seen.peers and self._begins(claimed):
                    self._link.send(Found())
                    has_begun, renewed = True, float("-inf")  # others learn of it at once
                    continue
            except Exception as error:  # the DHT may be away for a while
                logger.debug("The DHT did not answer: %r", error)
                epoch = -1
            pause = RENEWED_EVERY if self.others else LOOK_ALONE
            self._stop.wait(LOOK_EVERY if epoch < 0 else pause)

    def _begins(self, claimed: float) -> bool:
        if not self._public:
            return False
        waiting = [str(peer) for peer, record in self.others.items() if record.public]
        settle = 0.0 if self._is_first else SETTLE
        return may_begin(str(self._dht.peer_id), waiting, time.monotonic() - claimed, settle)

    def _epoch(self) -> int:
        progress = self._link.progress
        return progress.epoch if progress is not None else -1

    def _publish(self, epoch: int) -> None:
        record: dict[str, Any] = {
            "peer_id": self._dht.peer_id.to_bytes(),
            "epoch": epoch,
            "public": self._public,
        }
        self._dht.store(
            self._key, subkey=self._own_subkey, value=record, expiration_time=get_dht_time() + LIFETIME
        )

    def _fetch(self) -> dict[PeerID, NodeRecord]:
        return read_nodes(self._dht, self._key)


def nodes_of(dht: DHT, run_key: str) -> Callable[[], list[str]]:
    """For a peer without a node: the ids of those that have the run's parameters, the most advanced first, by their own
    account. To be asked again and again; it may take seconds."""
    dht.add_validators([SchemaValidator(NodesSchema, prefix=run_key), RSASignatureValidator()])

    def look() -> list[str]:
        try:
            records = read_nodes(dht, f"{run_key}_{WORDS}")
        except Exception as error:  # the DHT may be away for a while
            logger.debug("The DHT did not answer: %r", error)
            return []
        here = sorted((-record.epoch, str(peer)) for peer, record in records.items() if record.epoch >= 0)
        return [peer for _, peer in here]

    return look


def read_nodes(dht: DHT, key: str) -> dict[PeerID, NodeRecord]:
    """The records of a run's other nodes."""
    found = dht.get(key, latest=True)
    records: dict[PeerID, NodeRecord] = {}
    for subkey, value in (found.value if found and isinstance(found.value, dict) else {}).items():
        record = read_record(dht, NodeRecord, subkey, value)
        if record is not None and len(records) < MAX_PEERS:
            records[PeerID(record.peer_id)] = record
    records.pop(dht.peer_id, None)
    return records
