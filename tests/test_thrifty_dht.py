"""What a node of the DHT asks for each word that is said, and how long it waits: real nodes, on loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import hivemind.dht.node
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.utils import get_dht_time

from tests.virtual_time import run_in_virtual_time
from volunteer_kit.swarm.net.dht import (
    ASKED,
    FORGIVEN,
    LEAST_SECONDS,
    OPTIONS,
    ThriftyDHTNode,
    TimedDHTProtocol,
    TimedStub,
)

NODES = 8
STARTUP = 120.0  # s that p2pd has to start on a busy machine


@asynccontextmanager
async def nodes(count: int = NODES):
    found: list[ThriftyDHTNode] = []
    try:
        for _ in range(count):
            maddrs = await found[0].get_visible_maddrs() if found else []
            found.append(
                await ThriftyDHTNode.create(
                    initial_peers=maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_auto_relay=False,
                    startup_timeout=STARTUP, **OPTIONS,
                )  # fmt: skip
            )
        yield found
    finally:
        await asyncio.gather(*(node.shutdown() for node in found if node.is_alive))


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story(), 280))


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    monkeypatch.setattr(hivemind.dht.node, "DHTProtocol", TimedDHTProtocol)
    for kept in ("_rpc_handlers", "_stub_type"):  # hivemind keeps them with the class, where those derived find them
        monkeypatch.setattr(TimedDHTProtocol, kept, None)
        monkeypatch.setattr(DHTProtocol, kept, None)


def count_calls(node: ThriftyDHTNode) -> Counter:
    """Of what this node asks others from now on."""
    calls: Counter = Counter()
    for name in ("call_find", "call_store"):
        call = getattr(node.protocol, name)

        async def counted(*args, call=call, name=name, **kwargs):
            calls[name] += 1
            return await call(*args, **kwargs)

        setattr(node.protocol, name, counted)
    return calls


async def say(node: ThriftyDHTNode, value: int) -> bool:
    return await node.store("progress", value, get_dht_time() + 60, subkey=node.peer_id.to_base58())


async def heard(node: ThriftyDHTNode) -> dict:
    found = await node.get("progress", latest=True)
    return {subkey: entry.value for subkey, entry in found.value.items()}


def test_what_is_said_again_is_stored_without_a_search():
    async def story():
        async with nodes() as all_nodes:
            for node in all_nodes:
                assert await say(node, 1)
            for node in all_nodes:
                calls = count_calls(node)
                assert await say(node, 2)
                assert calls["call_find"] == 0 and 0 < calls["call_store"] <= node.num_replicas
                calls.clear()
                everybody = {other.peer_id.to_base58() for other in all_nodes}
                assert (await heard(node)).keys() == everybody
                assert calls["call_find"] <= ASKED and calls["call_store"] == 0
            assert set((await heard(all_nodes[-1])).values()) == {2}

    run(story)


def test_replicas_that_are_gone_are_replaced():
    async def story():
        async with nodes() as all_nodes:
            place = DHTID.generate("progress")
            speaker, *others = sorted(all_nodes, key=lambda node: node.node_id.xor_distance(place), reverse=True)
            assert await say(speaker, 1)
            for node in others[-2:]:  # the nearest
                await node.shutdown()
            for value in (2, 3):
                assert await say(speaker, value)
            alive = others[:-2]
            for node in alive:
                assert await heard(node) == {speaker.peer_id.to_base58(): 3}
            holding = [node for node in [speaker, *alive] if node.protocol.storage.get(place) is not None]
            assert len(holding) >= speaker.num_replicas

    run(story)


def test_a_new_node_that_is_nearer_is_found_by_all():
    async def story():
        async with nodes(3) as old:
            assert await say(old[0], 1)
            maddrs = await old[0].get_visible_maddrs()
            near = DHTID(DHTID.generate("progress") ^ 1)
            new = await ThriftyDHTNode.create(
                node_id=near, initial_peers=maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=STARTUP,
                **OPTIONS,
            )  # fmt: skip
            try:
                assert await say(new, 5) and await say(old[0], 2)
                said = {old[0].peer_id.to_base58(): 2, new.peer_id.to_base58(): 5}
                for node in [*old, new]:
                    assert await heard(node) == said
            finally:
                await new.shutdown()

    run(story)


def test_a_plain_hivemind_node_is_understood(monkeypatch):
    async def story():
        async with nodes(1) as ours:
            monkeypatch.setattr(hivemind.dht.node, "DHTProtocol", DHTProtocol)
            maddrs = await ours[0].get_visible_maddrs()
            plain = await DHTNode.create(
                initial_peers=maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=STARTUP
            )
            try:
                assert await say(ours[0], 1) and await say(plain, 2)
                assert sorted((await heard(ours[0])).values()) == sorted((await heard(plain)).values()) == [1, 2]
            finally:
                await plain.shutdown()

    run(story)


class Peer:
    """Answers, or lets the time run out."""

    def __init__(self):
        self.fails = False

    async def rpc_find(self, request, timeout=None):
        if self.fails:
            raise asyncio.TimeoutError
        return request


def test_who_does_not_answer_is_awaited_as_long_as_others_take():
    protocol = TimedDHTProtocol(_initialized_with_create=True)
    protocol.wait_timeout = 5.0
    alive, gone = Peer(), Peer()
    gone.fails = True
    assert protocol.wait_timeout == 5.0, "nothing is known yet"

    async def story():
        for _ in range(6):
            await TimedStub(alive, protocol._patience).rpc_find(b"", timeout=5.0)
        assert protocol.wait_timeout == LEAST_SECONDS
        with pytest.raises(asyncio.TimeoutError):
            await TimedStub(gone, protocol._patience).rpc_find(b"", timeout=5.0)
        assert LEAST_SECONDS < protocol.wait_timeout <= 5.0, "it may be our line"
        await TimedStub(alive, protocol._patience).rpc_find(b"", timeout=5.0)
        assert protocol.wait_timeout == LEAST_SECONDS, "it was not"
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await TimedStub(gone, protocol._patience).rpc_find(b"", timeout=5.0)
        assert protocol.wait_timeout == 5.0, "when nobody answers it is"

    run_in_virtual_time(story, 120)  # on a busy machine an answer that is given at once may take seconds


@pytest.mark.parametrize("vain, is_asked", [(1, True), (FORGIVEN, True), (FORGIVEN + 1, False)])
def test_who_did_not_answer_is_asked_again_as_soon_as_it_calls_unless_it_never_answers(vain, is_asked):
    async def story():
        async with nodes(2) as (first, second):
            peer = second.peer_id
            first.blacklist.ban_counter[peer] = vain - 1
            first.blacklist.register_failure(peer)
            assert peer in first.blacklist
            assert await second.protocol.call_ping(first.peer_id)
            await asyncio.sleep(0)  # what it has noted of the caller, it notes in a task
            assert (peer not in first.blacklist) == is_asked
            assert first.blacklist.ban_counter[peer] == vain

    run(story)


@pytest.mark.parametrize(("why", "is_fatal"), [("local time must be within 3 seconds", True), ("", False)])
def test_who_calls_another_program_under_our_key_keeps_nobody_from_starting(monkeypatch, why, is_fatal):
    async def call_ping(self, peer, validate=False, strict=True):
        if validate:
            raise ValidationError(why or f"Peer {peer} can't access this node. Probably, ...")
        return "its id"

    monkeypatch.setattr(DHTProtocol, "call_ping", call_ping)
    protocol = object.__new__(TimedDHTProtocol)
    if is_fatal:
        with pytest.raises(ValidationError):
            asyncio.run(protocol.call_ping("a peer", validate=True))
    else:
        assert asyncio.run(protocol.call_ping("a peer", validate=True)) == "its id"
