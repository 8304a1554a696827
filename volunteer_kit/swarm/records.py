"""What peers write about themselves into the DHT: signed, typed, bounded; and what of it is believed.

A record is signed with the peer's libp2p key, so its owner is the very peer id that averaging authenticates. Records
that do not fit the schema are refused by every DHT node that stores them; numbers that fit but cannot be true (a speed
no device has, an epoch that time does not allow) are dropped when they are read.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.logging import get_logger
from pydantic.v1 import BaseModel, StrictBool, confloat, conint, constr

from volunteer_kit.swarm.forked import LeanDHT
from volunteer_kit.swarm.identity import peer_id_of_owner

logger = get_logger(__name__)
MAX_PEERS = 10_000
MAX_EPOCH = 2**31
LATE = 5.0  # s without a word; clocks may differ by 3


# --- who is here ---


class PeerRecord(BaseModel):
    """One volunteer, as the others see it. At most a few hundred bytes."""

    peer_id: bytes
    fingerprint: constr(strict=True, regex=r"[0-9a-f]{8,64}\Z")  # of the settings that must be equal to average
    name: constr(strict=True, max_length=64)
    device: constr(strict=True, max_length=64)
    epoch: conint(strict=True, ge=0, lt=MAX_EPOCH)
    total_samples: conint(strict=True, ge=0, lt=2**53)  # in applied steps, by its own account
    samples_per_second: confloat(strict=True, ge=0.0, lt=1e9)
    loss: confloat(strict=True, ge=0.0, lt=1e9) | None
    client_mode: StrictBool
    protocol: conint(strict=True, ge=0, lt=2**31) = 1  # runs.PROTOCOL_VERSION; older kits tell none
    hidden: StrictBool = False  # its name is not for the public


class PeersSchema(BaseModel):
    peers: dict[BytesWithPublicKey, PeerRecord | None]


def peers_key(run_id: str) -> str:
    return f"{run_id}_peers"


class PeerBoard:
    """Publishes this peer's record under the run's name and reads the others'.

    :param lifetime: s that a record stays without renewal; peers that vanish are forgotten after it
    """

    def __init__(self, dht: DHT, run_id: str, lifetime: float = 60.0):
        self.dht, self.run_id, self.lifetime = dht, run_id, lifetime
        signer = RSASignatureValidator()
        self._own_subkey = signer.local_public_key
        dht.add_validators([SchemaValidator(PeersSchema, prefix=run_id), signer])

    def publish(self, record: PeerRecord | None) -> None:
        """Store our record (None: we have left) without waiting for the DHT."""
        self.dht.store(
            peers_key(self.run_id),
            subkey=self._own_subkey,
            value=None if record is None else record.dict(),
            expiration_time=get_dht_time() + self.lifetime,
            return_future=True,
        )

    def fetch(self) -> dict[PeerID, PeerRecord]:
        """Records of the run's peers, ourselves included; those that claim another's peer id are dropped."""
        found = self.dht.get(peers_key(self.run_id), latest=True)
        records = {}
        for subkey, value in (found.value if found and isinstance(found.value, dict) else {}).items():
            record = read_record(self.dht, PeerRecord, subkey, value)
            if record is not None and len(records) < MAX_PEERS:
                records[PeerID(record.peer_id)] = record
        return records


def parse_record(schema: type[BaseModel], subkey: Any, value: Any) -> Any | None:
    """A DHT entry -> a record of the peer that signed it, or None."""
    if not isinstance(value, ValueWithExpiration) or value.value is None or not isinstance(subkey, bytes):
        return None
    try:
        record = schema.parse_obj(value.value)
    except (ValueError, TypeError):  # TypeError: msgpack has keys that are no strings
        return None
    owner = peer_id_of_owner(subkey)
    return record if owner is not None and owner.to_bytes() == record.peer_id else None


def read_record(dht: DHT, schema: type[BaseModel], subkey: Any, value: Any) -> Any | None:
    """The same, of peers that may take part in the run that `dht` is of."""
    record = parse_record(schema, subkey, value)
    if record is None or not isinstance(dht, LeanDHT):
        return record
    return record if dht.admission.believes(PeerID(record.peer_id)) else None


# --- progress: what decides when the swarm steps ---


@dataclass(frozen=True)
class Limits:
    """What a run's devices and time allow one peer to claim.

    :param max_samples_per_second: of one peer; a generous bound of the fastest machine anybody may bring
    :param target_batch_size: samples of an epoch; nobody can have accumulated many times of it
    :param min_epoch_seconds: the swarm cannot do epochs faster than this
    """

    target_batch_size: int
    max_samples_per_second: float = 10_000.0
    min_epoch_seconds: float = 0.2


def is_plausible(claim: LocalTrainingProgress, limits: Limits, now: float, lifetime: float) -> bool:
    """Could this progress be true, whatever the others say?"""
    return (
        math.isfinite(claim.time)
        and now - 2 * lifetime <= claim.time <= now + 5.0  # s; hivemind lets clocks differ by 3
        and math.isfinite(claim.samples_per_second)
        and claim.samples_per_second <= limits.max_samples_per_second
        and claim.samples_accumulated <= 4 * limits.target_batch_size
        and claim.epoch < MAX_EPOCH
    )


def believed_epoch(claims: Iterable[tuple[int, Hashable]], own_epoch: int, max_advance: int) -> int:
    """The swarm's epoch from what peers claim: the highest that time allows or another account confirms.

    One peer that claims a million would otherwise be everybody's `global_epoch`, and nobody would average again.

    :param claims: (epoch, account) of the other peers, each plausible by itself
    :param own_epoch: where we are
    :param max_advance: epochs that can have passed since we last knew
    """
    claims = sorted(claims, key=lambda claim: -claim[0])
    for i, (epoch, account) in enumerate(claims):
        confirmed = any(epoch - other <= 1 and by != account for other, by in claims[i + 1 :])
        only_witness = len(claims) == 1 and own_epoch == 0  # we just came: there is nobody else to ask
        if epoch <= own_epoch + max_advance or confirmed or only_witness:
            return max(own_epoch, epoch)
    return own_epoch


class PacedEvent(threading.Event):
    """An event that lets itself be set once a `period` (s), or at any time while `urgent`."""

    def __init__(self, period: float):
        super().__init__()
        self.period, self.urgent = period, True
        self._last = float("-inf")

    def set(self) -> None:
        if self.urgent or time.monotonic() - self._last >= self.period:
            self.urgent = False
            super().set()

    def clear(self) -> None:
        self._last = time.monotonic()
        super().clear()


class SwarmProgressTracker(ProgressTracker):
    """hivemind's tracker, believing only what can be true. `claims_dropped` counts the rest.

    hivemind signs and stores a record after every microbatch, 20 a second on a small model; here one a
    `report_period`, and at once when the epoch changes. Between two the others extrapolate by speed.

    :param limits: bounds of one peer's claims
    :param report_period: s
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        limits: Limits,
        report_period: float = 0.25,
        start: bool,
        **kwargs,
    ):
        self.limits, self.claims_dropped = limits, 0
        self.highest_claim = 0  # epoch that somebody claims, believed or not
        self.behind: frozenset[PeerID] = frozenset()  # others whose epoch is not ours yet
        self.num_late = 0  # of these, who will not be in the next round: they are gone, or have a state to take first
        self._attends = False  # trains nothing
        self._trained = -math.inf  # the last epoch that samples of ours are of
        self._own_epoch = (0, time.monotonic())  # and since when: all that we know for certain
        super().__init__(dht, prefix, target_batch_size, start=False, **kwargs)
        self.should_report_progress = PacedEvent(report_period)
        if start:
            self.start()

    def attend(self, epoch: int) -> None:
        """Be counted as a member, at this epoch, without samples."""
        if not self._attends or self.local_progress.epoch != epoch:
            self._attends = True
            self.report_local_progress(epoch, 0)

    async def _progress_reporter(self) -> None:
        """Stores our record when it has changed, and before it expires.

        hivemind's leaves out who has no samples: whoever only attends would be met in rounds by peers that do not know
        of it, who call them off again.
        """
        loop, last_report = asyncio.get_running_loop(), -math.inf
        while not self.shutdown_triggered.is_set():
            patience = max(0.0, last_report - get_dht_time() + self.metadata_expiration / 2)
            await loop.run_in_executor(None, self.should_report_progress.wait, patience)
            claim, last_report = self.local_progress, get_dht_time()
            if self.should_report_progress.is_set():
                self.should_report_progress.clear()
            else:  # a microbatch of minutes: told with the old time it would be taken for a lie
                claim = claim.copy(update={"time": last_report})
            # not by the claim: where epochs are short it is always one of a beginning, with no samples yet
            if self._attends or self._trained >= self.global_epoch - 1:
                key, expiration = self.training_progress_key, last_report + self.metadata_expiration
                self.dht.store(key, claim.dict(), expiration, subkey=self._local_public_key, return_future=True)

    def report_local_progress(self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True):
        if local_epoch != self.local_progress.epoch or samples_accumulated == 0:
            self.should_report_progress.urgent = True
        if samples_accumulated > 0:
            self._attends, self._trained = False, local_epoch
        super().report_local_progress(local_epoch, samples_accumulated, update_global_samples)

    def shutdown(self, timeout: float | None = None) -> None:
        self.should_report_progress.urgent = True
        super().shutdown(timeout)

    def _account_of(self, peer_id: bytes) -> bytes:
        known = self.dht.admission.account_of(PeerID(peer_id)) if isinstance(self.dht, LeanDHT) else None
        return known or peer_id

    def look_again(self, timeout: float) -> None:
        """Fetch the others' progress now and wait for it, `timeout` s at most."""
        self.fetched_global_progress_this_epoch.clear()
        self.global_progress.next_fetch_time = 0.0
        self.global_state_updated.set()  # wakes the fetcher, which then finds that it is time
        self.fetched_global_progress_this_epoch.wait(timeout)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        if not isinstance(metadata, dict):
            metadata = {}
        now, kept, own_id = get_dht_time(), {}, self.dht.peer_id.to_bytes()
        for subkey, value in metadata.items():
            claim = read_record(self.dht, LocalTrainingProgress, subkey, value)
            if claim is not None and is_plausible(claim, self.limits, now, self.metadata_expiration):
                kept[subkey] = (claim, value.expiration_time)
            elif isinstance(value, ValueWithExpiration) and value.value is not None:
                self.claims_dropped += 1
        if self.local_progress.epoch != self._own_epoch[0]:
            self._own_epoch = (self.local_progress.epoch, time.monotonic())
        own_epoch, since = self._own_epoch
        max_advance = 2 + int((time.monotonic() - since) / self.limits.min_epoch_seconds)
        others = [
            (c.epoch, self._account_of(c.peer_id))
            for c, _ in kept.values()
            if c.peer_id != own_id and not c.client_mode
        ]
        self.highest_claim = max((epoch for epoch, _ in others), default=0)
        believed = believed_epoch(others, own_epoch, max_advance)
        # a peer in client mode does not make the epoch, but may be the first to begin the next one
        trusted = {key: kept[key] for key in kept if kept[key][0].epoch <= believed + kept[key][0].client_mode}
        self.claims_dropped += len(kept) - len(trusted)
        progress = super()._parse_swarm_progress_data(
            {subkey: ValueWithExpiration(claim.dict(), expiration) for subkey, (claim, expiration) in trusted.items()}
        )
        behind = [c for c, _ in trusted.values() if c.peer_id != own_id and c.epoch < own_epoch]
        self.behind = frozenset(PeerID(c.peer_id) for c in behind)
        self.num_late = sum(c.epoch < own_epoch - 1 and c.time < now - LATE for c in behind)
        # hivemind counts records, and takes itself for alone while its own is not stored yet
        progress.num_peers = 1 + sum(claim.peer_id != own_id for claim, _ in trusted.values())
        return progress
