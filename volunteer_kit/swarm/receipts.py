"""Receipts: after each round every reducer signs whose samples entered its slice of the average, and how many.

Nobody's word about himself makes credit. A receipt lies in the DHT under the epoch that its round's step led to, signed
with its reducer's libp2p key, for as long as a monitor may be away; credit.py makes credit of what several say.
"""

from __future__ import annotations

import hashlib
import math
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.logging import get_logger
from pydantic.v1 import BaseModel, confloat, conint, validator
from pydantic.v1 import conbytes as _conbytes

from volunteer_kit.swarm.agreement import LINEAGE_SIZE, advance
from volunteer_kit.swarm.credit_bounds import Bounds, Machine, believed_weights
from volunteer_kit.swarm.records import MAX_EPOCH, PeerRecord, read_record

logger = get_logger(__name__)
LIFETIME = 1800.0  # s that receipts wait in the DHT for a monitor that is being restarted
MAX_SENDERS = 300  # of one receipt, which stays below 4 KB
MAX_RECEIPTS = 1024  # of one epoch, as many as a group has members
FIRST_WINDOW = 600.0  # s in which senders can have done their samples, for a reducer that has not seen a round yet
ENTRY = struct.Struct("<8sI")  # digest of a sender's peer id, samples
DIGEST_SIZE = 8
PATIENCE = 20.0  # s for the DHT to store a receipt
ATTEMPTS = 3

AccountOf = Callable[[PeerID], "bytes | None"]  # None: not known here


@dataclass(frozen=True)
class Reduced:
    """A round in which this member reduced a slice.

    :param epoch: that the round's step led to, as in StepReport
    :param round_name: what the step's lineage is made of: of the round, and of what this member received of it
    :param lineage_before: of the state that this member began the round with
    :param weights: senders whose parts all entered this member's slice, ourselves among them, with declared weights
    :param seconds: that the round took, without looking for the group
    :param round_id: the leader's random number, equal on all members; empty: the name stands for it
    :param at: time.monotonic() when it was over
    """

    epoch: int
    round_name: bytes
    lineage_before: bytes
    group: tuple[PeerID, ...]
    weights: Mapping[PeerID, float]
    seconds: float
    round_id: bytes = b""
    at: float = field(default_factory=time.monotonic)


# --- one receipt ---


def digest_of(peer_id: PeerID) -> bytes:
    """How a receipt names a peer. 8 bytes: to make a peer id with another's digest takes 2^64 RSA keys."""
    return hashlib.blake2b(peer_id.to_bytes(), digest_size=DIGEST_SIZE).digest()


def round_digest(round_id: bytes) -> bytes:
    return hashlib.blake2b(round_id, digest_size=DIGEST_SIZE).digest()


def _exactly(size: int):
    return _conbytes(strict=True, min_length=size, max_length=size)


class Receipt(BaseModel):
    """What one reducer says of one round: 100 bytes and 12 a sender."""

    peer_id: bytes
    epoch: conint(strict=True, ge=0, lt=MAX_EPOCH)
    round: _exactly(DIGEST_SIZE)
    before: _exactly(LINEAGE_SIZE)  # lineage of the signer's state, before the step and after
    after: _exactly(LINEAGE_SIZE)
    time: confloat(strict=True, ge=0.0, lt=1e12)  # DHT time, s, when the round was over
    senders: _conbytes(strict=True, max_length=MAX_SENDERS * ENTRY.size)  # ENTRYs, by digest, ascending

    @validator("senders")
    def _each_once_in_order(cls, packed: bytes) -> bytes:  # noqa: N805  pydantic's validators are class methods
        if len(packed) % ENTRY.size:
            raise ValueError("senders are not whole")
        digests = [digest for digest, _ in ENTRY.iter_unpack(packed)]
        if any(one >= next_one for one, next_one in zip(digests, digests[1:], strict=False)):
            raise ValueError("senders are not in order, or named twice")
        return packed

    @property
    def samples(self) -> dict[bytes, int]:
        """Digest of a sender's peer id -> its samples."""
        return dict(ENTRY.iter_unpack(self.senders))

    @property
    def signer(self) -> bytes:
        return digest_of(PeerID(self.peer_id))


def make_receipt(own_id: PeerID, reduced: Reduced, weights: Mapping[PeerID, float], now: float) -> Receipt:
    """:param weights: those that are believed. Of more senders than fit, those are named that the round's number picks
    for this reducer, so that each is named by many."""
    number = round_digest(reduced.round_id or reduced.round_name)
    entries = [(digest_of(peer), min(2**32 - 1, round(weight))) for peer, weight in weights.items() if weight > 0]
    if len(entries) > MAX_SENDERS:
        draw = own_id.to_bytes() + number
        entries.sort(key=lambda entry: hashlib.blake2b(draw + entry[0], digest_size=8).digest())
    return Receipt(
        peer_id=own_id.to_bytes(),
        epoch=reduced.epoch,
        round=number,
        before=reduced.lineage_before,
        after=advance(reduced.lineage_before, reduced.round_name),
        time=float(now),
        senders=b"".join(ENTRY.pack(*entry) for entry in sorted(entries[:MAX_SENDERS])),
    )


# --- where they lie ---


def receipts_key(run_key: str, epoch: int) -> str:
    return f"{run_key}_receipts_{epoch}"


class ReceiptBoard:
    """Stores our receipts under the run's key and reads everybody's. A DHT node that stores one checks its signature,
    which also binds it to its epoch's key; its shape is checked by who reads it."""

    def __init__(self, dht: DHT, run_key: str, lifetime: float = LIFETIME):
        self.dht, self.run_key, self.lifetime = dht, run_key, lifetime
        signer = RSASignatureValidator()
        self._own_subkey = signer.local_public_key
        dht.add_validators([signer])

    def publish(self, receipt: Receipt) -> Future:
        """Store ours. :returns: a future of whether it was stored"""
        return self.dht.store(
            receipts_key(self.run_key, receipt.epoch),
            subkey=self._own_subkey,
            value=receipt.dict(),
            expiration_time=get_dht_time() + self.lifetime,
            return_future=True,
        )

    def fetch(self, epochs: Iterable[int]) -> dict[int, list[Receipt]]:
        """Receipts of each of `epochs`, signed by who they say; an epoch that could not be asked for is missing."""
        asked = {
            epoch: self.dht.get(receipts_key(self.run_key, epoch), latest=True, return_future=True) for epoch in epochs
        }
        found = {}
        for epoch, future in asked.items():
            try:
                found[epoch] = read_receipts(self.dht, epoch, future.result(PATIENCE))
            except Exception as e:  # of hivemind's DHT, in its process
                logger.debug(f"receipts of epoch {epoch} could not be fetched: {e!r}")
        return found


def read_receipts(dht: DHT, epoch: int, found: ValueWithExpiration | None) -> list[Receipt]:
    """What the DHT holds of an epoch -> those receipts in it that are receipts, of it, and of peers that may take
    part."""
    entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
    receipts = []
    for subkey, value in entries:
        receipt = read_record(dht, Receipt, subkey, value)
        if receipt is not None and receipt.epoch == epoch and len(receipts) < MAX_RECEIPTS:
            receipts.append(receipt)
    return receipts


# --- who writes them ---


class ReceiptWriter:
    """Signs a receipt after each round, in a thread of its own: SwarmOptimizer.on_reduced.

    A sender's samples are bounded by the time since our last round, not since its own last part: gradients of an older
    model do not enter a round, and idle hours are no credit saved up.

    :param records: what the peers say of themselves, PeerBoard.fetch; may take seconds
    :param account_of: whose peer it is; None: every peer counts as an account of its own
    """

    def __init__(
        self,
        board: ReceiptBoard,
        bounds: Bounds,
        records: Callable[[], Mapping[PeerID, PeerRecord]],
        account_of: AccountOf | None = None,
    ):
        self._board, self._bounds, self._records, self._account_of = board, bounds, records, account_of
        self._own_id: PeerID = board.dht.peer_id
        self._last_began: float | None = None
        self.written = self.failed = 0  # receipts
        self._waiting: queue.Queue[tuple[Reduced, float, float] | None] = queue.Queue(maxsize=64)
        self._thread = threading.Thread(target=self._write_all, name="receipts", daemon=True)
        self._thread.start()

    def __call__(self, reduced: Reduced) -> None:
        """Returns at once; what cannot be written in time is dropped, for others sign as well."""
        began = reduced.at - reduced.seconds
        window = FIRST_WINDOW if self._last_began is None else reduced.at - self._last_began
        self._last_began = began
        if not reduced.weights:
            return
        try:
            self._waiting.put_nowait((reduced, window, get_dht_time() - (time.monotonic() - reduced.at)))
        except queue.Full:
            self.failed += 1

    def close(self, patience: float = 5.0) -> None:
        """Write what waits, for `patience` s at most."""
        self._waiting.put(None)
        self._thread.join(patience)

    def _write_all(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                self._write(*job)
            except Exception:
                logger.exception("A receipt could not be written")
                self.failed += 1

    def _write(self, reduced: Reduced, window: float, now: float) -> None:
        machines = machines_of(self._records(), self._account_of)
        weights = believed_weights(reduced.weights, window, machines, self._bounds)
        receipt = make_receipt(self._own_id, reduced, weights, now)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(attempt)
            if self._board.publish(receipt).result(PATIENCE):
                self.written += 1
                return
        self.failed += 1


def machines_of(records: Mapping[PeerID, PeerRecord], account_of: AccountOf | None) -> dict[PeerID, Machine]:
    """Records of peers whose account is known."""
    machines = {}
    for peer, record in records.items():
        account = digest_of(peer) if account_of is None else account_of(peer)
        if account is not None and math.isfinite(record.samples_per_second):
            machines[peer] = Machine(account, record.device, record.samples_per_second)
    return machines
