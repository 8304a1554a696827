"""A peer that is only a key: what it claims, signs and stores."""

from __future__ import annotations

from functools import partial

from hivemind.dht import DHT, DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.swarm.net.identity import peer_id_of_owner
from volunteer_kit.swarm.records.peer_record import PeerRecord

NOW = 1_800_000_000.0
LIFETIME = 60.0


class Somebody:
    """A key of its own: its peer id, and the subkey that its records carry."""

    def __init__(self):
        self.key = RSAPrivateKey()
        self.validator = RSASignatureValidator(self.key)
        self.subkey = self.validator.local_public_key
        self.peer_id = peer_id_of_owner(self.subkey)

    def claims(self, peer_id: PeerID | None = None, **changes) -> dict:
        return {
            "peer_id": (peer_id or self.peer_id).to_bytes(),
            "epoch": 3,
            "samples_accumulated": 10,
            "samples_per_second": 5.0,
            "time": get_dht_time(),
            "client_mode": False,
            **changes,
        }


def entry(value) -> ValueWithExpiration:
    return ValueWithExpiration(value, NOW + LIFETIME)


def record_of(peer_id: PeerID, **changes) -> PeerRecord:
    values = dict(
        peer_id=peer_id.to_bytes(),
        fingerprint="0123456789abcdef",
        name="a laptop",
        device="cpu",
        epoch=3,
        total_samples=1234,
        samples_per_second=2.5,
        loss=4.5,
        client_mode=False,
    )
    return PeerRecord(**{**values, **changes})


async def _call_store(_, node: DHTNode, to: PeerID, key: DHTID, subkey: bytes, value: bytes, expiration: float):
    return list(await node.protocol.call_store(to, [key], [value], expiration, [subkey]))


def store_as(somebody: Somebody, stranger: DHT, to: PeerID, key: str, value, sign: bool = True) -> bool:
    """A stranger's client, which checks nothing, writes into `to`'s storage. :returns: whether it was taken."""
    serializer, key_id, expiration = DHTProtocol.serializer, DHTID.generate(source=key), get_dht_time() + 300
    record = DHTRecord(key_id.to_bytes(), serializer.dumps(somebody.subkey), serializer.dumps(value), expiration)
    raw = somebody.validator.sign_value(record) if sign else record.value
    call = partial(_call_store, to=to, key=key_id, subkey=somebody.subkey, value=raw, expiration=expiration)
    [taken] = stranger.run_coroutine(call)
    return taken
