"""What a node of the DHT keeps, and believes of another's answers: nothing that a single call could make last."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tests.trust import RunKeys
from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.swarm.admitted_dht import LONGEST, MAX_HANDED_ON, MAX_VALUE, UNSIGNED, AdmittedDHTProtocol

B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (2, 3))
KEY, STATEMENTS = DHTID.generate("leaders").to_bytes(), DHTID.generate("statements").to_bytes()
DAY = 86_400.0


class Guard(RecordValidatorBase):
    """Of a key where nothing but what is signed may stand."""

    def validate(self, record):
        return record.key != STATEMENTS or MSGPackSerializer.loads(record.value) == b"signed"


@pytest.fixture
def run(tmp_path):
    return RunKeys(tmp_path)


@pytest.fixture
def node(run):
    """Without a network: B and C have shown their tokens."""
    node = AdmittedDHTProtocol(_initialized_with_create=True)
    node.admission, node.record_validator, node.client_mode = run.admission(own=B, bob=B, cleo=C), Guard(), False
    node.storage, node.cache, node.node_info = DHTLocalStorage(), DHTLocalStorage(), dht_pb2.NodeInfo()
    node.routing_table = RoutingTable(DHTID.generate("here"), 20, 5)
    return node


def store(node, subkey, value: bytes, seconds: float, *, by: PeerID = B, key: bytes = KEY) -> bool:
    request = dht_pb2.StoreRequest(
        keys=[key], subkeys=[subkey], values=[value], expiration_time=[get_dht_time() + seconds], in_cache=[False]
    )
    response = asyncio.run(node.rpc_store(request, SimpleNamespace(remote_id=by)))
    return list(response.store_ok) == [True]


def owner() -> tuple[bytes, PeerID]:
    """A subkey of signed records, and whose."""
    public = RSAPrivateKey().get_public_key().to_bytes()
    return b"[owner:" + public + b"]", PeerID(peer_id_of_key(public))


def of(subkey) -> bytes:
    return MSGPackSerializer.dumps(subkey)


def test_what_nobody_has_signed_is_not_kept_for_long(node, run):
    subkey, dora = owner()
    assert node.admission.show(run.token(dora, "dora"), dora) is None
    place = of(B.to_bytes())
    assert store(node, place, b"\x01", UNSIGNED - 5)
    assert not store(node, place, b"\x01", UNSIGNED + 5)
    for by in (B, dora):
        assert store(node, of(subkey), b"\x01", LONGEST - 5, by=by)
        assert not store(node, of(subkey), b"\x01", LONGEST + 5, by=by)
    for never in (float("nan"), float("inf")):
        assert not store(node, place, b"\x01", never)
        assert not store(node, of(subkey), b"\x01", never)


def test_nobody_fills_a_key_with_records_of_keys_that_he_has_made(node, run):
    """Each of them can be signed well; a dictionary that is too large is nobody's answer any more."""
    assert not store(node, of(owner()[0]), b"\x01", UNSIGNED + 5), "nor for long"
    kept = [store(node, of(owner()[0]), b"\x01", 60.0) for _ in range(MAX_HANDED_ON + 5)]
    assert sum(kept) == MAX_HANDED_ON
    subkey, dora = owner()
    assert node.admission.show(run.token(dora, "dora"), dora) is None
    assert store(node, of(subkey), b"\x01", 60.0, by=dora), "there is room for who takes part"
    assert store(node, of(C.to_bytes()), b"\x01", 60.0, by=C)


@pytest.mark.parametrize("name", [b"place", b"", b"\x12\x20short", b"\x00\x24\x08\x01\x12\x20" + bytes(32), 7])
def test_a_name_that_is_no_peers_is_not_kept(node, name):
    """Such could be made up by the thousand, and who asks donors would ask them."""
    assert not store(node, of(name), b"\x01", 60.0)


def test_a_value_in_place_of_a_dictionary_is_over_soon(node):
    """It lives longer than the leaders' declarations, so none of them would be kept beside it."""
    assert not store(node, DHTProtocol.IS_REGULAR_VALUE, b"\x01", DAY)
    assert store(node, of(B.to_bytes()), b"\xc3", 20.0)


def test_a_statement_stays_as_long_as_its_validator_lets_it(node):
    signed = MSGPackSerializer.dumps(b"signed")
    assert store(node, DHTProtocol.IS_REGULAR_VALUE, signed, 30 * DAY, key=STATEMENTS), "a manifest, for a month"
    assert not store(node, DHTProtocol.IS_REGULAR_VALUE, b"\x01", 60.0, key=STATEMENTS)
    assert not store(node, DHTProtocol.IS_REGULAR_VALUE, signed, 30 * DAY), "under another key"


def test_nobody_declares_another_as_leader_or_donor(node):
    assert not store(node, of(C.to_bytes()), b"\xc2", 60.0, by=B)
    assert store(node, of(C.to_bytes()), b"\xc3", 20.0, by=C)


def dictionary(**entries: tuple) -> bytes:
    """name=(subkey, value, s): as one node hands it to another."""
    found = DictionaryDHTValue()
    for subkey, value, seconds in entries.values():
        found.store(subkey, value, get_dht_time() + seconds)
    return MSGPackSerializer.dumps(found)


def test_of_what_another_node_hands_on_the_bad_is_left_out(node, run):
    subkey, author = owner()
    banned, mallory = owner()
    assert node.admission.show(run.token(mallory, "mallory"), mallory) is None
    node.admission.ban(run.ban("mallory")[0])
    entries = {
        "good": (subkey, b"good", 60.0),
        "banned": (banned, b"bad", 60.0),
        "long": (owner()[0], b"bad", 10 * DAY),
        "large": (owner()[0], b"x" * (MAX_VALUE + 1), 60.0),
        "another's": (C.to_bytes(), b"\xc2", 60.0),
    }
    assert store(node, DHTProtocol.IS_DICTIONARY, dictionary(**entries), 60.0)
    kept = node.storage.get(DHTID.from_bytes(KEY)).value
    assert [key for key, _ in kept.items()] == [subkey]
    assert not store(node, DHTProtocol.IS_DICTIONARY, b"\x93", 60.0), "no dictionary at all"


def found(node, kind, value: bytes, seconds: float, key: bytes = KEY) -> dht_pb2.FindResult:
    result = dht_pb2.FindResult(type=kind, value=value, expiration_time=get_dht_time() + seconds)
    response = dht_pb2.FindResponse(results=[result])
    node.take_out_bad(dht_pb2.FindRequest(keys=[key]), response)
    return response.results[0]


def test_an_answer_that_would_outlive_all_others_is_not_believed(node):
    """We keep what we find, and hand it on."""
    assert found(node, dht_pb2.FOUND_REGULAR, b"\x01", DAY).type == dht_pb2.NOT_FOUND
    assert found(node, dht_pb2.FOUND_REGULAR, b"\x01", 60.0).type == dht_pb2.FOUND_REGULAR
    assert found(node, dht_pb2.FOUND_REGULAR, of(b"signed"), 30 * DAY, STATEMENTS).type == dht_pb2.FOUND_REGULAR
    told = dictionary(good=(B.to_bytes(), b"\xc3", 20.0), jammed=(C.to_bytes(), b"\xc2", DAY))
    result = found(node, dht_pb2.FOUND_DICTIONARY, told, DAY)
    assert [key for key, _ in MSGPackSerializer.loads(result.value).items()] == [B.to_bytes()]
    assert result.expiration_time < get_dht_time() + 21
    assert found(node, dht_pb2.FOUND_DICTIONARY, b"junk", 20.0).type == dht_pb2.NOT_FOUND
