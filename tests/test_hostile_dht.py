"""A stranger's calls to real peers' DHT, and its answers to theirs: they go on, and keep nothing bad."""

from __future__ import annotations

import asyncio
import itertools
import struct
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer

PATIENCE = 60.0  # s for one call on a busy machine
BOARD = "board"
KEY = DHTID.generate(BOARD)
PLACES = itertools.count(1)  # next to KEY; the one of a node that is gone is not free at once
CALL = DHTProtocol.__name__ + ".rpc_"


def nested(levels: int = 3000) -> bytes:
    data = b"\x90"
    for _ in range(levels):
        data = b"\x91\xc9" + struct.pack(">IB", len(data), 0x40) + data
    return data


def words(subkey: bytes, value: bytes, expires_in: float = 60.0) -> dht_pb2.StoreRequest:
    """One record under KEY."""
    until = get_dht_time() + expires_in
    return dht_pb2.StoreRequest(
        keys=[KEY.to_bytes()], subkeys=[subkey], values=[value], expiration_time=[until], in_cache=[False]
    )


ATTACKS: dict[str, Callable[[bytes], dht_pb2.StoreRequest]] = {
    "deep value": lambda own: words(own, nested()),
    "deep name": lambda own: words(nested(), b"\x01"),
    "deep dictionary": lambda own: words(b"", nested()),
    "deep plain value": lambda own: words(DHTProtocol.IS_REGULAR_VALUE, nested()),
    "no msgpack": lambda own: words(own, b"\xc1"),
    "forever": lambda own: words(own, b"\x01", float("nan")),
    "large": lambda own: words(own, MSGPackSerializer.dumps(bytes(2**20))),
    "long name": lambda own: words(MSGPackSerializer.dumps(b"x" * 2**20), b"\x01"),
}


@pytest.fixture(scope="module")
def swarm():
    """Two peers of an open run."""
    first = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=120))
    second = start_peer(PeerConfig(first.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=120))
    yield first, second
    second.shutdown()
    first.shutdown()


def as_stranger(peer: Peer, story: Callable[[P2P, PeerID], Awaitable[None]]) -> None:
    async def run(identity: str) -> None:
        P2P.generate_identity(identity)  # an RSA key, as ours; others have no name in the DHT
        p2p = await P2P.create(initial_peers=peer.visible_maddrs(), identity_path=identity, startup_timeout=120)
        try:
            await p2p.wait_for_at_least_n_peers(1, attempts=60)
            await asyncio.wait_for(story(p2p, peer.peer_id), 4 * PATIENCE)
        finally:
            await p2p.shutdown()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(f"{folder}/identity.key"))


def own_name(p2p: P2P) -> bytes:
    return MSGPackSerializer.dumps(p2p.peer_id.to_bytes())


def read_board(peer: Peer) -> dict:
    found = peer.dht.get(BOARD, latest=True)
    return {name: entry.value for name, entry in found.value.items()} if found is not None else {}


def write_board(peer: Peer, value: object) -> bool:
    return peer.dht.store(BOARD, value, get_dht_time() + 500, subkey=peer.peer_id.to_bytes())


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_stranger_stores_ends_nobody(swarm, name):
    first, second = swarm
    assert write_board(second, name)

    async def attack(p2p: P2P, victim: PeerID) -> None:
        for _ in range(3):
            with suppress(Exception):  # a refusal
                request = ATTACKS[name](own_name(p2p))
                await asyncio.wait_for(
                    p2p.call_protobuf_handler(victim, CALL + "store", request, dht_pb2.StoreResponse), PATIENCE
                )
        fine = words(own_name(p2p), MSGPackSerializer.dumps("fine"))
        answer = await p2p.call_protobuf_handler(victim, CALL + "store", fine, dht_pb2.StoreResponse)
        assert list(answer.store_ok) == [True], "others' words are taken as before"

    as_stranger(first, attack)
    assert first.dht.is_alive() and second.dht.is_alive()
    for peer in swarm:
        assert read_board(peer)[second.peer_id.to_bytes()] == name
    assert {"fine"} <= set(read_board(first).values()) <= {"fine", name}


@pytest.mark.parametrize("kind", [dht_pb2.FOUND_REGULAR, dht_pb2.FOUND_DICTIONARY])
@pytest.mark.parametrize("value", [nested(), b"\xc1", b"\xdd\xff\xff\xff\xff"])
def test_what_a_stranger_answers_ends_nobody(swarm, kind, value):
    """It takes a place next to the key, so that everybody asks it."""
    first, second = swarm
    asked = asyncio.Event()
    node = dht_pb2.NodeInfo(node_id=DHTID(KEY ^ next(PLACES)).to_bytes())

    async def answer(request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        asked.set()
        result = dht_pb2.FindResult(type=kind, value=value, expiration_time=get_dht_time() + 500)
        result.nearest_node_ids.extend([b"\xff" * 100_000])
        result.nearest_peer_ids.extend([b"junk"])
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=node)

    async def pong(request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        return dht_pb2.PingResponse(peer=node, dht_time=get_dht_time(), available=True)

    async def keep(request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """A node that takes nothing is forgotten, before it is asked."""
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=node)

    async def attack(p2p: P2P, victim: PeerID) -> None:
        await p2p.add_protobuf_handler(CALL + "store", keep, dht_pb2.StoreRequest)
        await p2p.add_protobuf_handler(CALL + "find", answer, dht_pb2.FindRequest)
        await p2p.add_protobuf_handler(CALL + "ping", pong, dht_pb2.PingRequest)
        request = dht_pb2.PingRequest(peer=node)
        await p2p.call_protobuf_handler(victim, CALL + "ping", request, dht_pb2.PingResponse)
        loop = asyncio.get_running_loop()
        while not asked.is_set():
            assert await loop.run_in_executor(None, write_board, first, "here")
            assert (await loop.run_in_executor(None, read_board, first))[first.peer_id.to_bytes()] == "here"

    as_stranger(first, attack)
    assert first.dht.is_alive() and second.dht.is_alive()


def test_a_flood_of_a_stranger_fills_no_memory(swarm):
    """4,000 values of 16 kB, 64 MB in all; before, a node kept 912 MB of one member."""
    first, second = swarm
    process = psutil.Process(first.dht.pid)
    before = process.memory_info().rss

    async def attack(p2p: P2P, victim: PeerID) -> None:
        until, subkey = get_dht_time() + 500, own_name(p2p)
        for at in range(0, 4000, 100):
            request = dht_pb2.StoreRequest(
                keys=[DHTID.generate(number).to_bytes() for number in range(at, at + 100)],
                subkeys=[subkey] * 100,
                values=[MSGPackSerializer.dumps(bytes(16_000))] * 100,
                expiration_time=[until] * 100,
                in_cache=[at % 200 == 0] * 100,
            )
            await p2p.call_protobuf_handler(victim, CALL + "store", request, dht_pb2.StoreResponse)
        keys = [DHTID.generate(3900).to_bytes()] * 500
        request = dht_pb2.FindRequest(keys=keys)
        answer = await p2p.call_protobuf_handler(victim, CALL + "find", request, dht_pb2.FindResponse)
        assert answer.ByteSize() < 2**20

    as_stranger(first, attack)
    assert write_board(second, "after") and read_board(first)[second.peer_id.to_bytes()] == "after"
    assert process.memory_info().rss - before < 50 * 2**20
