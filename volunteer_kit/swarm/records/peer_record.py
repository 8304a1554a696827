"""Define the record that a peer writes about itself into the DHT: signed, typed, bounded.

A record is signed with the peer's libp2p key, so its owner is the very peer id that averaging authenticates. Records
that do not fit the schema are refused by every DHT node that stores them; numbers that fit but cannot be true (a speed
no device has, an epoch that time does not allow) are dropped when they are read (device_speeds.py).
"""

from __future__ import annotations

from typing import Any

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from pydantic.v1 import BaseModel, StrictBool, confloat, conint, constr, root_validator, validator

from volunteer_kit import __version__
from volunteer_kit.swarm.net.fork_safety import LeanDHT
from volunteer_kit.swarm.net.identity import peer_id_of_owner
from volunteer_kit.swarm.records.failures import CAUSES, MOST
from volunteer_kit.swarm.records.kits import VERSION

MAX_PEERS = 10_000
MAX_EPOCH = 2**31


class RoundsRecord(BaseModel):
    """How the peer's rounds went in all its stays, by its own account. Causes of newer kits are left out, so that their
    records are not refused."""

    rounds: conint(strict=True, ge=0, le=MOST) = 0
    complete_groups: conint(strict=True, ge=0, le=MOST) = 0
    failed: dict[str, conint(strict=True, ge=0, le=MOST)] = {}
    kit: constr(strict=True, regex=VERSION) = ""  # the version of the peer's kit; see PeerRecord.kit

    @root_validator(pre=True)
    def only_known_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in cls.__fields__ if name in values}  # hivemind's schemas forbid others

    @validator("failed", pre=True)
    def only_known_causes(cls, failed: Any) -> Any:
        return {c: failed[c] for c in CAUSES if c in failed} if isinstance(failed, dict) else failed


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
    rounds: RoundsRecord | None = None  # older kits tell none

    @property
    def kit(self) -> str:
        """The version of the peer's kit; "": an older one, which tells none. It travels among the rounds, where older
        kits accept a field that they do not know; here they would refuse the record."""
        return self.rounds.kit if self.rounds else ""


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
        """Store our record (None: we have left), with our kit's version, without waiting for the DHT."""
        value = None if record is None else record.dict()
        if value is not None:
            value["rounds"] = {**(value["rounds"] or RoundsRecord().dict()), "kit": __version__}
        self.dht.store(
            peers_key(self.run_id),
            subkey=self._own_subkey,
            value=value,
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
