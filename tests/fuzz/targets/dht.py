"""Calls of the DHT: what a node takes in, gives out, and believes of another's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.schema import SchemaValidator
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from tests.fuzz.forms import MSGPACK, Protobuf
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import CALLER, MEMBERS, UNREADABLE, call, loop, run_keys
from tests.somebody import Somebody, record_of
from volunteer_kit.swarm.net.access.control import Admission, NotAdmitted
from volunteer_kit.swarm.net.access.dht_auth import AdmittedDHTProtocol
from volunteer_kit.swarm.net.dht_storage import BoundedStorage
from volunteer_kit.swarm.net.identity import peer_id_of_owner
from volunteer_kit.swarm.records.peer_record import PeersSchema, peers_key
from volunteer_kit.swarm.records.signed import StatementValidator
from volunteer_kit.swarm.state.manifest import validators
from volunteer_kit.swarm.sync.timing import Deadline

registry = Registry()
KEY = DHTID.generate("leaders").to_bytes()
OF_PEERS = DHTID.generate(peers_key("test")).to_bytes()
# hivemind answers a caller whose call raises one of these with its text
REFUSALS = (*UNREADABLE, NotAdmitted)
EXPIRES = 4e9  # s since 1970
_somebody = Somebody()
_validator = CompositeValidator(
    [
        SchemaValidator(PeersSchema, prefix="test"),
        RSASignatureValidator(_somebody.key),
        *validators(run_keys().trust, "test"),
    ]
)


def _node(admission: Admission, kind: type[AdmittedDHTProtocol] = AdmittedDHTProtocol) -> Any:
    node = kind(_initialized_with_create=True)
    node.record_validator, node.client_mode, node.admission = _validator, False, admission
    node.cache = DHTLocalStorage()
    node.node_info = dht_pb2.NodeInfo(node_id=DHTID.generate("here").to_bytes())
    node.routing_table, node.node_id = RoutingTable(DHTID.generate("here"), 20, 5), DHTID.generate("here")
    node.rpc_semaphore, node.num_replicas, node.bucket_size = asyncio.Semaphore(8), 5, 20
    node.wait_timeout = 5.0
    node.use_storage(BoundedStorage())
    return node


def _open_node() -> Any:
    return _node(Admission())


def _run_node() -> Any:
    return _node(run_keys().admission(own=MEMBERS[0], bob=CALLER, cleo=MEMBERS[2]))


def _of(value: Any) -> bytes:
    return MSGPackSerializer.dumps(value)


def _dictionary() -> DictionaryDHTValue:
    entries = DictionaryDHTValue()
    entries.store(CALLER.to_bytes(), _of(True), NOW + 100)
    entries.store(_somebody.subkey, _of(record_of(_somebody.peer_id).dict()), NOW + 100)
    return entries


def _signed() -> bytes:
    value = _of(record_of(_somebody.peer_id).dict())
    record = DHTRecord(OF_PEERS, _of(_somebody.subkey), value, EXPIRES)
    return _somebody.validator.sign_value(record)


def _store_requests() -> Iterator[bytes]:
    soon = NOW + 100
    for key, subkey, value in (
        (KEY, _of(CALLER.to_bytes()), _of(True)),
        (KEY, DHTProtocol.IS_REGULAR_VALUE, _of([1, (2,)])),
        (KEY, DHTProtocol.IS_DICTIONARY, _of(_dictionary())),
        (OF_PEERS, _of(_somebody.subkey), _signed()),
    ):
        expires = EXPIRES if key == OF_PEERS else soon
        yield dht_pb2.StoreRequest(
            keys=[key], subkeys=[subkey], values=[value], expiration_time=[expires], in_cache=[False],
            peer=dht_pb2.NodeInfo(node_id=DHTID.generate("caller").to_bytes()),
        ).SerializeToString()  # fmt: skip


_STORE, _FIND = Protobuf(dht_pb2.StoreRequest, MSGPACK), Protobuf(dht_pb2.FindRequest)


def _store(node: Any, data: bytes) -> bool:
    try:
        request = dht_pb2.StoreRequest.FromString(data)
    except DecodeError:
        return False
    request.peer.Clear()  # else the node calls back
    return any(call(node.rpc_store, request).store_ok)


@registry.add(_store_requests, *REFUSALS, form=_STORE, max_bytes=16_384)
def dht_store(data: bytes) -> bool:
    """rpc_store in a run with an authority, by a member with a good token."""
    return _store(_run_node(), data)


@registry.add(_store_requests, *REFUSALS, form=_STORE, max_bytes=16_384)
def dht_store_open(data: bytes) -> bool:
    """rpc_store in an open run, by anybody."""
    return _store(_open_node(), data)


_full = _run_node()
for _name in ("leaders", "others"):
    _full.storage.put("somebody", DHTID.generate(_name), _of([1]), NOW + 1e6, None)
_full.storage.put("somebody", DHTID.generate("places"), _of(True), NOW + 1e6, CALLER.to_bytes())


@registry.add(
    lambda: [
        dht_pb2.FindRequest(keys=[KEY]).SerializeToString(),
        dht_pb2.FindRequest(keys=[DHTID.generate("places").to_bytes(), b"k" * 20]).SerializeToString(),
    ],
    *REFUSALS,
    form=_FIND,
    max_bytes=16_384,
)
def dht_find(data: bytes) -> bool:
    """rpc_find"""
    try:
        request = dht_pb2.FindRequest.FromString(data)
    except DecodeError:
        return False
    request.peer.Clear()
    return bool(call(_full.rpc_find, request).results)


class Answers:
    """A stub of a peer that answers everything with one message."""

    response: Any = None

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        return self.response

    rpc_ping = rpc_store = rpc_find


class Asking(AdmittedDHTProtocol):
    """A node whose calls are all answered by `answers`."""

    answers = Answers()

    def get_stub(self, peer: PeerID) -> Any:
        return _Checked(self)


class _Checked:
    """take_out_bad as the real stub calls it."""

    def __init__(self, node: Asking) -> None:
        self.node = node

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        response = await self.node.answers.rpc_find(request)
        self.node.take_out_bad(request, response)
        return response


_asking = _node(run_keys().admission(own=MEMBERS[0], bob=CALLER), Asking)
_asking._patience = Deadline(5.0, floor=2.0)


def _find_responses() -> Iterator[bytes]:
    near = {"nearest_node_ids": [b"n" * 20], "nearest_peer_ids": [MEMBERS[2].to_bytes()]}
    for result in (
        dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=_of([1]), expiration_time=NOW + 100, **near),
        dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=_of(_dictionary()), expiration_time=EXPIRES, **near),
        dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, **near),
    ):
        yield dht_pb2.FindResponse(results=[result]).SerializeToString()


@registry.add(_find_responses, *REFUSALS, form=Protobuf(dht_pb2.FindResponse, MSGPACK), max_bytes=16_384)
def dht_find_answer(data: bytes) -> bool:
    """What another node answers to our rpc_find."""
    try:
        _asking.answers.response = dht_pb2.FindResponse.FromString(data)
    except DecodeError:
        return False
    return loop().run_until_complete(_asking.call_find(CALLER, [DHTID.from_bytes(KEY)])) is not None


@registry.add(lambda: [_somebody.subkey, b"[owner:ssh-rsa AAAA]"])
def record_owner(data: bytes) -> bool:
    """The subkey of a signed record."""
    peer_id_of_owner.cache_clear()
    return peer_id_of_owner(data) is not None


@registry.add(lambda: [_signed()], *UNREADABLE, form=MSGPACK)
def signed_record(data: bytes) -> bool:
    """A value with its signature, as every node looks at it."""
    record = DHTRecord(OF_PEERS, _of(_somebody.subkey), data, EXPIRES)
    return _validator.validate(record)


_statement = StatementValidator("statements", lambda envelope: (NOW, len(envelope)))


@registry.add(lambda: [_of(b"envelope")], form=MSGPACK)
def statement(data: bytes) -> bool:
    """What may stand under the key of a signed statement."""
    _statement._newest = -1
    key = DHTID.generate(source="statements").to_bytes()
    return _statement.validate(DHTRecord(key, DHTProtocol.IS_REGULAR_VALUE, data, NOW))
