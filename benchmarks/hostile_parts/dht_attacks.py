"""Attacks on the DHT's three calls, and by a node that answers them."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Callable

import msgpack
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from benchmarks.hostile_parts import messages
from benchmarks.hostile_parts.attack import MEMBER, OPEN, STRANGER, Attack
from benchmarks.hostile_parts.hostile_peer import ENTRY, REGULAR, HostilePeer
from benchmarks.hostile_parts.impostors import Lies
from volunteer_kit.swarm.node.discovery import WORDS

CALL = 3_900_000  # bytes of one call; p2pd takes 4 MB
BOTH = (MEMBER, OPEN)
DEADLINES = (2.0, 5.0)  # s that a call of the DHT waits: at least, and at most
LISTEN = 6.0  # s in which a node that lies is asked


async def nested_values(peer: HostilePeer) -> str:
    """Under plain keys and in a dictionary, as the extension itself and within a list."""
    for target in peer.targets:
        for value in (messages.nested(), messages.nested_word(), messages.nested_dictionary()):
            await peer.store(target, peer.key("nested"), value)
            await peer.store(target, peer.key("nested"), value, subkey=ENTRY)
    return peer.summary()


async def nested_subkeys(peer: HostilePeer) -> str:
    for target in peer.targets:
        for subkey in (messages.nested_word(), messages.nested()):
            await peer.store(target, peer.key("subkeys"), b"\x01", subkey=subkey)
    return peer.summary()


async def nested_own_word(peer: HostilePeer) -> str:
    """Store a nested word at the keys of nodes and peers, under our own peer id: everybody reads it."""
    read = (WORDS, "peers")
    for name in (f"{peer.prefix}_{what}" for what in read):
        for target in peer.targets:
            await peer.store(target, peer.key(name), messages.nested_word(), subkey=peer.own_subkey())
    await asyncio.sleep(3.0)  # until it has been read
    return peer.summary()


async def nested_records(peer: HostilePeer) -> str:
    """The same in a dictionary that one node hands on to another."""
    entry = [[peer.p2p.peer_id.to_bytes(), messages.nested_word(), get_dht_time() + 300]]
    inner = MSGPackSerializer.dumps([8, get_dht_time() + 300, entry])
    value = msgpack.packb(msgpack.ExtType(messages.DICTIONARY, inner))
    for target in peer.targets:
        key = peer.key(f"{peer.prefix}_{WORDS}")
        await peer.store(target, key, value, subkey=ENTRY)
    await asyncio.sleep(3.0)
    return peer.summary()


async def deep_values(peer: HostilePeer) -> str:
    """Plain arrays and maps, very deep, very wide, and promised only."""
    for target in peer.targets:
        for value in (messages.deep_array(), messages.deep_map(), messages.wide_array(), messages.promised_array()):
            await peer.store(target, peer.key("deep"), value)
            await peer.store(target, peer.key("deep"), b"\x01", subkey=value)
            await peer.store(target, peer.key("deep"), value, subkey=ENTRY)
    return peer.summary()


async def long_keys(peer: HostilePeer) -> str:
    """Keys of no byte, and of a megabyte: a number that is compared and shown."""
    for target in peer.targets:
        for key in (b"", b"\xff" * 2**20):
            await peer.store(target, key, b"\x01")
            request = peer.signed(dht_pb2.FindRequest(keys=[key]))
            await peer.try_unary(target, peer.handler("dht", "rpc_find"), request)
            await peer.ping(target, node=key)
    return peer.summary()


def _records(peer: HostilePeer, count: int, size: int, expiration: float, name: str) -> list:
    value = bytes(size)
    keys = (DHTID.generate(source=f"{name}-{index}").to_bytes() for index in range(count))
    return [(key, REGULAR, value, expiration) for key in keys]


async def _fill(peer: HostilePeer, count: int, size: int, expiration: float, name: str) -> str:
    """Store values of one size under keys of their own."""
    each = max(1, min(500, CALL // (size + 80)))
    sent = 0
    for start in range(0, count, each):
        if not peer.is_time_left:
            break
        records = _records(peer, min(each, count - start), size, expiration, f"{name}-{start}")
        await peer.try_unary(peer.victim, peer.handler("dht", "rpc_store"), peer.store_request(records))
        sent += len(records)
    return f"{sent} values of {size} B: {peer.summary()}"


async def many_values(peer: HostilePeer) -> str:
    return await _fill(peer, 57_000, 16_000, get_dht_time() + 500, f"many{peer.random.random()}")


async def long_values(peer: HostilePeer) -> str:
    return await _fill(peer, 60, 3_500_000, get_dht_time() + 500, "long")


async def small_values(peer: HostilePeer) -> str:
    return await _fill(peer, 400_000, 1, get_dht_time() + 500, "small")


async def many_subkeys(peer: HostilePeer) -> str:
    """One key, and a subkey of its own for each value."""
    key, expiration, sent = peer.key("subkeys"), get_dht_time() + 500, 0
    for start in range(0, 100_000, 500):
        if not peer.is_time_left:
            break
        names = (MSGPackSerializer.dumps(f"{index:08}".encode() * 8) for index in range(start, start + 500))
        records = [(key, subkey, bytes(1000), expiration) for subkey in names]
        await peer.try_unary(peer.victim, peer.handler("dht", "rpc_store"), peer.store_request(records))
        sent += len(records)
    await peer.try_unary(peer.victim, peer.handler("dht", "rpc_find"), peer.signed(dht_pb2.FindRequest(keys=[key])))
    return f"{sent} subkeys: {peer.summary()}"


async def endless_values(peer: HostilePeer) -> str:
    """Records that expire at NaN, at infinity, before it began; in the storage and in the cache."""
    for index in range(4):
        for expiration in (math.nan, math.inf, -math.inf, 1e308):
            for in_cache in (False, True):
                record = (peer.key(f"endless{index}"), REGULAR, bytes(3_000_000), expiration)
                request = peer.store_request([record], in_cache=[in_cache])
                await peer.try_unary(peer.victim, peer.handler("dht", "rpc_store"), request)
    return peer.summary()


async def one_key_500_times(peer: HostilePeer) -> str:
    """Megabytes under one key, and a request that names it again and again."""
    key = peer.key("again")
    for index in range(4):
        for expiration in (math.nan, get_dht_time() + 400):
            subkey = MSGPackSerializer.dumps(f"part{index}")
            await peer.store(peer.victim, key, bytes(3_000_000), subkey=subkey, expiration=expiration)
    await peer.store(peer.victim, peer.key("again too"), bytes(3_000_000), expiration=math.nan)
    for name in ("again", "again too"):
        request = peer.signed(dht_pb2.FindRequest(keys=[peer.key(name)] * 500))
        await peer.try_unary(peer.victim, peer.handler("dht", "rpc_find"), request, 20.0)
    return peer.summary()


async def find_many_keys(peer: HostilePeer) -> str:
    """As many keys as a call holds: of each the nearest nodes are named."""
    keys = [DHTID.generate(source=f"no-{index}").to_bytes() for index in range(100_000)]
    request = peer.signed(dht_pb2.FindRequest(keys=keys))
    for _ in range(3):
        await peer.try_unary(peer.victim, peer.handler("dht", "rpc_find"), request, 20.0)
    return peer.summary()


async def crooked_requests(peer: HostilePeer) -> str:
    """Lists of unequal lengths, and more records than anybody has."""
    key = peer.key("crooked")
    shapes = [
        {"keys": [key] * 3, "subkeys": [REGULAR], "values": [b"\x01"], "expiration_time": [1e12], "in_cache": [True]},
        {"keys": [], "subkeys": [REGULAR] * 9, "values": [], "expiration_time": [], "in_cache": []},
        {"keys": [key], "subkeys": [], "values": [b"\x01"], "expiration_time": [1e12], "in_cache": [False]},
        {"keys": [b""] * 150_000, "subkeys": [b""] * 150_000, "values": [b""] * 150_000,
         "expiration_time": [1e12] * 150_000, "in_cache": [False] * 150_000},
    ]  # fmt: skip
    for target in peer.targets:
        for shape in shapes:
            request = peer.signed(dht_pb2.StoreRequest(**shape))
            await peer.try_unary(target, peer.handler("dht", "rpc_store"), request)
    return peer.summary()


async def junk_calls(peer: HostilePeer) -> str:
    """Four megabytes that are no protobuf, to each call."""
    for name in ("rpc_ping", "rpc_store", "rpc_find"):
        for data in (b"\xff" * CALL, b"\x0a" * CALL, bytes(CALL)):
            await peer.try_unary(peer.victim, peer.handler("dht", name), data)
    return peer.summary()


async def ping_storm(peer: HostilePeer) -> str:
    """Thousands of calls, each from "another" node, each asking for a call back."""
    calls = (peer.ping(peer.victim, DHTID.generate().to_bytes(), validate=True) for _ in range(3000))
    await peer.many(calls, at_once=64)
    return peer.summary()


async def _lie(
    peer: HostilePeer, find: Callable[[dht_pb2.FindRequest], list], after: Callable[[], float] = float
) -> str:
    """Be the node nearest to what the honest ones look for, and answer them. :param after: draws s, each time"""
    lies = Lies(peer)
    lies.find, lies.find_after = find, after
    await lies.serve()
    near = int.from_bytes(peer.key(f"{peer.prefix}_{WORDS}"), "big") ^ 1
    lies.node_id = DHTID(near).to_bytes()
    for target in peer.targets:
        await peer.ping(target, node=lies.node_id, validate=True)
    until = min(peer.deadline, time.monotonic() + LISTEN)
    while time.monotonic() < until:
        for name in (WORDS, "peers"):
            near = int.from_bytes(peer.key(f"{peer.prefix}_{name}"), "big") ^ peer.random.randrange(1, 99)
            lies.node_id = DHTID(near).to_bytes()
            for target in peer.targets:
                await peer.ping(target, node=lies.node_id)
        await asyncio.sleep(1.0)
    return f"asked {lies.called['find']} times"


async def nested_findings(peer: HostilePeer) -> str:
    shapes = (
        (dht_pb2.FOUND_DICTIONARY, messages.nested_dictionary()), (dht_pb2.FOUND_REGULAR, messages.nested_word()),
        (dht_pb2.FOUND_DICTIONARY, messages.nested_word()), (dht_pb2.FOUND_DICTIONARY, messages.deep_array()),
    )  # fmt: skip

    def find(request: dht_pb2.FindRequest) -> list[dht_pb2.FindResult]:
        kind, value = shapes[peer.random.randrange(len(shapes))]
        found = dht_pb2.FindResult(type=kind, value=value, expiration_time=get_dht_time() + 300)
        return [found] * len(request.keys)

    return await _lie(peer, find)


async def large_findings(peer: HostilePeer) -> str:
    """Values of megabytes, nodes by the ten thousand, more results than keys, and what never expires."""

    def find(request: dht_pb2.FindRequest) -> list[dht_pb2.FindResult]:
        choice = peer.random.randrange(3)
        if choice == 0:
            value, expiration = bytes(3_000_000), math.nan
            return [dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=value, expiration_time=expiration)]
        if choice == 1:
            ids = [DHTID.generate().to_bytes() for _ in range(20_000)]
            return [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=ids, nearest_peer_ids=ids)]
        return [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)] * 100_000

    return await _lie(peer, find)


async def late_findings(peer: HostilePeer) -> str:
    """Megabytes of zeros just when they are no longer awaited: a line of hivemind's log would be four times as long."""

    def after() -> float:
        return peer.random.choice(DEADLINES) + peer.random.uniform(-0.03, 0.01)

    zeros = dht_pb2.FindResult(type=dht_pb2.FOUND_REGULAR, value=bytes(3_900_000), expiration_time=get_dht_time() + 300)
    told = await _lie(peer, lambda request: [zeros], after)
    await asyncio.sleep(max(DEADLINES))  # until the last has come
    return told


async def costly_records(peer: HostilePeer) -> str:
    """Calls of 4 MB whose records take long to refuse: hundreds of wrong fields, signed well; signatures that begin and
    do not end; keys with a long exponent. Eight calls at a time."""
    signer = RSASignatureValidator(RSAPrivateKey())
    begins, expiration = b"[signature:", get_dht_time() + 300
    own = MSGPackSerializer.dumps(signer.local_public_key)
    fields = MSGPackSerializer.dumps({str(number): 1 for number in range(2500)})
    slow = rsa.RSAPublicNumbers((1 << 3070) + 1, peer.random.getrandbits(3072) | (1 << 3071) | 1).public_key()
    slow = MSGPackSerializer.dumps(b"[owner:" + RSAPublicKey(slow).to_bytes() + b"]")
    signature = b"[signature:" + base64.b64encode(bytes(383) + b"\x05") + b"]"
    keys = [peer.key(f"{peer.prefix}_{name}") for name in (WORDS, "peers")]
    signed = [signer.sign_value(DHTRecord(key, own, fields, expiration)) for key in keys]
    kinds = [(key, own, value) for key, value in zip(keys, signed, strict=True)]
    kinds += [(keys[1], own, begins * 1400), (keys[1], slow, b"\x01" + signature)]
    while peer.is_time_left:
        requests = []
        for key, subkey, value in kinds:
            count = min(500, CALL // (len(subkey) + len(value) + 40))
            requests += [peer.store_request([(key, subkey, value, expiration)] * count)] * 2
        target = peer.targets[peer.random.randrange(len(peer.targets))]
        calls = (peer.try_unary(target, peer.handler("dht", "rpc_store"), request) for request in requests)
        await asyncio.gather(*calls)
    return peer.summary()


ATTACKS = [
    Attack("dht-nested-values", "DHT rpc_store", 1, nested_values, (STRANGER, *BOTH), is_quick=True),
    Attack("dht-nested-subkeys", "DHT rpc_store", 1, nested_subkeys, (STRANGER, *BOTH)),
    Attack("dht-nested-own-word", "DHT rpc_store", 1, nested_own_word, BOTH, is_heavy=True),
    Attack("dht-nested-handed-on", "DHT rpc_store", 1, nested_records, BOTH),
    Attack("dht-nested-findings", "DHT answers to rpc_find", 1, nested_findings, BOTH),
    Attack("dht-deep-values", "DHT rpc_store", 1, deep_values, BOTH),
    Attack("dht-long-keys", "DHT rpc_store, rpc_find, rpc_ping", 1, long_keys, BOTH),
    Attack("dht-many-values", "DHT rpc_store", 4, many_values, BOTH, 25.0, is_heavy=True, is_quick=True),
    Attack("dht-small-values", "DHT rpc_store", 4, small_values, BOTH, 10.0),
    Attack("dht-long-values", "DHT rpc_store", 4, long_values, BOTH, 15.0),
    Attack("dht-many-subkeys", "DHT rpc_store", 4, many_subkeys, BOTH, 10.0),
    Attack("dht-endless-values", "DHT rpc_store", 4, endless_values, BOTH),
    Attack("dht-one-key-500-times", "DHT rpc_find", 4, one_key_500_times, BOTH, 30.0, is_heavy=True),
    Attack("dht-many-keys", "DHT rpc_find", 4, find_many_keys, BOTH),
    Attack("dht-large-findings", "DHT answers to rpc_find", 4, large_findings, BOTH),
    Attack("dht-late-findings", "DHT answers to rpc_find", 4, late_findings, BOTH),
    Attack("dht-costly-records", "DHT rpc_store", 4, costly_records, BOTH, 15.0),
    Attack("dht-crooked-requests", "DHT rpc_store", 4, crooked_requests, BOTH),
    Attack("dht-junk", "DHT rpc_store, rpc_find, rpc_ping", 5, junk_calls, (STRANGER, OPEN)),
    Attack("dht-ping-storm", "DHT rpc_ping", 5, ping_storm, BOTH, 8.0),
]
