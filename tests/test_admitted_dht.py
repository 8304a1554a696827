"""What a node of the DHT keeps, and believes of another's answers: nothing that a single call could make last."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from tests.trust import RunKeys
from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.access.dht_auth import (
    LONGEST,
    MAX_ANSWER,
    MAX_HANDED_ON,
    MAX_KEYS,
    MAX_MARKS,
    MAX_NEAREST,
    MAX_STORING,
    MAX_VALUE,
    TURN,
    UNSIGNED,
    AdmittedDHTProtocol,
)
from volunteer_kit.swarm.net.dht_routing import BATCH, MAX_REPLACEMENTS
from volunteer_kit.swarm.net.dht_storage import BoundedStorage
from volunteer_kit.swarm.net.serializer import bound_serializer

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
    set_up(node)
    return node


def set_up(node) -> None:
    node.cache, node.node_info = DHTLocalStorage(), dht_pb2.NodeInfo()
    node.node_id, node.bucket_size, node.num_replicas = DHTID.generate("here"), 20, 5
    node.routing_table = RoutingTable(node.node_id, 20, 5)
    node.use_storage(BoundedStorage())


@pytest.fixture(autouse=True)
def bounded():
    bound_serializer()


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


def odd_owner(bits: int, exponent: int) -> bytes:
    """A subkey with a key that nobody made: its modulus is any odd number."""
    key = rsa.RSAPublicNumbers(exponent, random.getrandbits(bits) | (1 << bits - 1) | 1).public_key()
    return b"[owner:" + RSAPublicKey(key).to_bytes() + b"]"


@pytest.mark.parametrize(
    "bits, exponent", [(2048, (1 << 2046) + 1), (2048, 3), (3072, (1 << 3070) + 1), (1024, 65537), (12_000, 65537)]
)
def test_a_record_whose_signature_would_take_long_to_check_is_not_looked_at(node, bits, exponent):
    """With a long exponent it is 9 ms, and one call has hundreds of them."""
    subkey = odd_owner(bits, exponent)
    assert not store(node, of(subkey), b"\x01", 60.0)
    told = dictionary(odd=(subkey, b"\x01", 60.0))
    assert found(node, dht_pb2.FOUND_DICTIONARY, told, 60.0).type == dht_pb2.NOT_FOUND


def test_a_value_with_many_beginnings_of_a_signature_is_not_looked_at(node):
    """hivemind looks for the end of each: 0.2 s for 16 KB."""
    begins = b"[signature:"
    subkey = of(owner()[0])
    assert store(node, subkey, begins * MAX_MARKS, 60.0), "this node's validator looks for no signature"
    assert not store(node, subkey, begins * (MAX_MARKS + 1), 120.0)
    for key, kind, value in (
        (KEY, dht_pb2.FOUND_REGULAR, begins * (MAX_MARKS + 1)),
        (KEY, dht_pb2.FOUND_DICTIONARY, dictionary(odd=(B.to_bytes(), begins * (MAX_MARKS + 1), 20.0))),
    ):
        assert found(node, kind, value, 20.0, key).type == dht_pb2.NOT_FOUND


class Slow(Guard):
    """Takes its turn for each record."""

    def validate(self, record):
        time.sleep(TURN)
        return super().validate(record)


def request_of(count: int, name: str) -> dht_pb2.StoreRequest:
    until = get_dht_time() + 60
    keys = [DHTID.generate((name, number)).to_bytes() for number in range(count)]
    return dht_pb2.StoreRequest(
        keys=keys, subkeys=[DHTProtocol.IS_REGULAR_VALUE] * count, values=[b"\x01"] * count,
        expiration_time=[until] * count, in_cache=[False] * count,
    )  # fmt: skip


def test_calls_of_one_peer_are_served_one_after_another_and_others_between(node):
    """Each may have 4 MB, and records that take seconds to check."""
    node.record_validator, served = Slow(), []

    async def call(peer: PeerID, name: str, count: int) -> None:
        response = await node.rpc_store(request_of(count, name), SimpleNamespace(remote_id=peer))
        assert len(response.store_ok) == count
        served.append((name, sum(response.store_ok)))

    async def story():
        flood = [asyncio.ensure_future(call(B, f"B{number}", 4)) for number in range(MAX_STORING + 2)]
        await asyncio.sleep(0)
        await call(C, "C", 1)
        assert [name for name, _ in served if name == "B1"] == [], "C does not wait for B's second"
        await asyncio.gather(*flood)

    asyncio.run(story())
    kept = [name for name, count in served if count == 4]
    assert kept == [f"B{number}" for number in range(MAX_STORING)], "in their order"
    assert {name for name, count in served if count == 0} == {f"B{MAX_STORING}", f"B{MAX_STORING + 1}"}, "too many wait"
    served.clear()
    asyncio.run(call(B, "later", 4))
    assert served == [("later", 4)]


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


@pytest.fixture
def open_node():
    """Of a run without an authority."""
    node = AdmittedDHTProtocol(_initialized_with_create=True)
    node.admission, node.record_validator, node.client_mode = Admission(), Guard(), False
    set_up(node)
    return node


def test_an_open_run_has_the_same_bounds(open_node):
    node = open_node
    assert store(node, of(B.to_bytes()), b"\x01", UNSIGNED - 5)
    for never in (float("nan"), float("inf"), UNSIGNED + 5):
        assert not store(node, of(B.to_bytes()), b"\x01", never)
    assert not store(node, of(C.to_bytes()), b"\x01", 60.0, by=B), "another's name"
    assert not store(node, of(b"place"), b"\x01", 60.0), "a name that is no peer's"
    assert not store(node, of(B.to_bytes()), b"x" * (MAX_VALUE + 1), 60.0)
    assert not store(node, DHTProtocol.IS_REGULAR_VALUE, b"\x01", DAY)
    kept = [store(node, of(owner()[0]), b"\x01", 60.0) for _ in range(MAX_HANDED_ON + 5)]
    assert sum(kept) == MAX_HANDED_ON - 1, "B's own stands there too"
    subkey, dora = owner()
    assert store(node, of(subkey), b"\x01", LONGEST - 5, by=dora)


@pytest.mark.parametrize("kind", ["node", "open_node"])
def test_a_request_that_is_not_whole_keeps_nothing(kind, request):
    node = request.getfixturevalue(kind)
    place, until = of(B.to_bytes()), get_dht_time() + 60
    good = dict(keys=[KEY], subkeys=[place], values=[b"\x01"], expiration_time=[until], in_cache=[False])
    for change in (
        dict(in_cache=[True]),
        dict(keys=[b"short"]),
        dict(keys=[KEY * 50_000]),
        dict(subkeys=[]),
        dict(values=[b"\x01", b"\x02"]),
        dict(subkeys=[of(B.to_bytes() * 5000)]),
        {name: value * (MAX_KEYS + 1) for name, value in good.items()},
    ):
        message = dht_pb2.StoreRequest(**{**good, **change})
        assert not any(asyncio.run(node.rpc_store(message, SimpleNamespace(remote_id=B))).store_ok)
    assert len(node.storage) == 0 and len(node.cache) == 0
    assert list(asyncio.run(node.rpc_store(dht_pb2.StoreRequest(**good), SimpleNamespace(remote_id=B))).store_ok)


@pytest.mark.parametrize("kind", ["node", "open_node"])
def test_an_answer_has_each_key_once_and_is_bounded(kind, request):
    """A request of 11 kB that named one key 500 times was answered with 4 GB."""
    node = request.getfixturevalue(kind)
    keys = [DHTID.generate(number).to_bytes() for number in range(4)]
    for key in keys:
        for number in range(60):
            node.storage.put(number, DHTID.from_bytes(key), bytes(MAX_VALUE), get_dht_time() + 60, b"%d" % number)
    ask = dht_pb2.FindRequest(keys=[keys[0]] * 500 + keys + [b"junk", KEY])
    answer = asyncio.run(node.rpc_find(ask, SimpleNamespace(remote_id=B)))
    assert answer.ByteSize() <= MAX_ANSWER + 100_000 and len(answer.results) == len(ask.keys)
    kinds = [result.type for result in answer.results]
    assert kinds[0] == dht_pb2.FOUND_DICTIONARY and set(kinds[1:501]) == {dht_pb2.NOT_FOUND}
    assert 1 <= kinds[501:].count(dht_pb2.FOUND_DICTIONARY) <= 2, "as many as there is room for"
    assert len(asyncio.run(node.rpc_find(dht_pb2.FindRequest(keys=[KEY] * 9999), SimpleNamespace(remote_id=B))).results)


def test_a_writer_is_charged_for_what_it_writes(open_node):
    subkey, dora = owner()
    assert store(open_node, of(subkey), b"\x01", 60.0, by=dora)
    assert store(open_node, of(owner()[0]), b"\x01", 60.0, by=B), "of a key that nobody has seen"
    assert store(open_node, of(subkey), b"\x02", 90.0, by=B), "dora's, handed on"
    storage = open_node.storage
    assert (
        storage.bytes_of(dora)
        and storage.bytes_of(B)
        and storage.bytes_of(dora) + storage.bytes_of(B) == (storage.total_bytes)
    )
    asyncio.run(flood(open_node, dora, 600))
    assert storage.bytes_of(dora) <= storage.bounds.per_writer
    assert store(open_node, of(C.to_bytes()), b"\x03", 60.0, by=C)


async def flood(node, peer: PeerID, count: int) -> None:
    """So many values of 16 kB, each under a key of its own."""
    until = get_dht_time() + 60
    for number in range(count):
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(number).to_bytes()],
            subkeys=[of(peer.to_bytes())],
            values=[bytes(MAX_VALUE)],
            expiration_time=[until],
            in_cache=[False],
        )
        await node.rpc_store(request, SimpleNamespace(remote_id=peer))


# --- who is in the routing table ---


def meet(node, node_id, peer: PeerID) -> None:
    asyncio.run(node.update_routing_table(node_id, peer))


def test_a_peer_has_one_node_id_and_nobody_takes_anothers(node):
    ids = [DHTID.generate(number) for number in range(50)]
    for node_id in ids:
        meet(node, node_id, B)
    table = node.routing_table
    assert table.get(peer_id=B) == ids[-1] and list(table.uid_to_peer_id) == [ids[-1]]
    meet(node, ids[-1], C)
    assert table[ids[-1]] == B and table.get(peer_id=C) is None
    meet(node, node.node_id, C)
    assert node.node_id not in table


def test_the_routing_table_is_bounded(node):
    peers = [PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(5000)]
    far = (1 << 159) ^ int(node.node_id) & (1 << 159)  # the half of all ids that we are not in: one bucket, never split

    async def story():
        for number, peer in enumerate(peers):
            await node.update_routing_table(DHTID(far | number), peer)

    asyncio.run(story())
    assert len(node.routing_table.uid_to_peer_id) <= 20 * 5 + 5 * MAX_REPLACEMENTS + 50


@pytest.mark.parametrize("length", [0, 19, 21, 2_000_000])
def test_a_node_id_of_another_length_is_none(node, length):
    """A long one would be a number of millions of digits, which its error message would spell out."""
    peer = dht_pb2.NodeInfo(node_id=b"\xff" * length)
    context = SimpleNamespace(remote_id=B)
    asyncio.run(node.rpc_ping(dht_pb2.PingRequest(peer=peer), context))
    asyncio.run(node.rpc_find(dht_pb2.FindRequest(peer=peer, keys=[KEY]), context))
    asyncio.run(node.rpc_store(dht_pb2.StoreRequest(peer=peer), context))
    assert not node.routing_table.uid_to_peer_id


def test_an_answer_names_no_nodes_without_end(node):
    result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
    for number in range(MAX_NEAREST + 1):
        result.nearest_node_ids.append(DHTID.generate(number).to_bytes())
        result.nearest_peer_ids.append(B.to_bytes())
    answers = dht_pb2.FindResponse(results=[result, dht_pb2.FindResult(nearest_node_ids=[b"\xff" * 21])])
    node.take_out_bad(dht_pb2.FindRequest(keys=[KEY, KEY]), answers)
    assert not any(len(one.nearest_node_ids) for one in answers.results)


def test_a_newcomer_is_handed_what_it_is_nearest_to(node):
    handed: dict[PeerID, int] = {}

    async def call_store(peer, keys, values, expiration_time, in_cache=None):
        assert sum(len(value) for value in values) <= BATCH or len(values) == 1
        handed[peer] = handed.get(peer, 0) + len(keys)
        return [True] * len(keys)

    node.call_store = call_store
    for number in range(200):
        node.storage.put(B, DHTID.generate(number), bytes(10_000), get_dht_time() + 60)

    async def story():
        await node.update_routing_table(DHTID.generate("new"), B)
        while sum(handed.values()) < 200:  # the only other node: it should have all
            await asyncio.sleep(0)
        await node.update_routing_table(DHTID.generate("new"), B)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert handed == {B: 200}
