"""Attacks on a node's streams: messages on its control stream, and requests for bulk."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import Iterable

import msgpack
from hivemind.p2p import P2P

from benchmarks.hostile_parts import messages
from benchmarks.hostile_parts.attack import MEMBER, OPEN, STRANGER, Attack
from benchmarks.hostile_parts.hostile_peer import BULK, CONTROL, HostilePeer, frame
from volunteer_kit.swarm.node.channels import MAX_HEAD
from volunteer_kit.swarm.node.links import LONGEST, Kind
from volunteer_kit.swarm.node.transfers import ANSWERS, CHECKPOINT, CHUNKS, OFFER, WITNESS
from volunteer_kit.swarm.rounds.exchange import PART

BOTH = (MEMBER, OPEN)
REQUESTS = (PART, ANSWERS, OFFER, CHUNKS, WITNESS, CHECKPOINT)
PACE = 2.0  # s that one write may take


def deflated(data: bytes) -> bytes:
    """Deflate a message as it travels in a control stream."""
    stream = zlib.compressobj(wbits=-15, memLevel=7)
    return (stream.compress(data) + stream.flush(zlib.Z_SYNC_FLUSH)).removesuffix(b"\x00\x00\xff\xff")


def words() -> list[bytes]:
    """Content that no node says: nested, wide, promised, of wrong types, and cut off."""
    odd = [
        None,
        7,
        "text",
        [],
        {},
        [[]] * 50,
        {"epoch": 2**63},
        [b"r" * 64, -(2**63)],
        [float("nan"), 1e308, [None] * 9],
    ]
    found = [messages.nested(), messages.nested_word(), messages.deep_array(), messages.deep_map()]
    found += [messages.promised_array(), messages.wide_array(200_000), b"", b"\xff" * 1000]
    found += [msgpack.packb(each) for each in odd]
    return found + [data[:-1] for data in found if len(data) > 1]


# --- messages ---


async def _tell(peer: HostilePeer, frames: Iterable[bytes], each_alone: bool = True) -> str:
    """Frames behind a good greeting, to everybody who has a node; the first bad one ends a stream."""
    for target in peer.with_nodes:
        batches = [[each] for each in frames] if each_alone else [list(frames)]
        for batch in batches:
            if peer.is_time_left:
                await peer.say(target, CONTROL, peer.greeting() + b"".join(batch))
    return peer.summary()


async def odd_messages(peer: HostilePeer) -> str:
    return await _tell(peer, [frame(Kind.MESSAGE, deflated(word)) for word in words()])


async def odd_frames(peer: HostilePeer) -> str:
    """Kinds that nobody knows, frames of wrong lengths, messages that are not compressed, and streams that end."""
    found = [frame(kind, data) for kind in (*Kind, 9, 255) for data in (b"", b"\x00" * 7, b"\xff" * 900)]
    found += [b"\x00\x00", b"\x00\x00\x00\xff\x01", (2**31).to_bytes(4, "big") + b"\x01", b"\xff" * 5]
    return await _tell(peer, found)


async def message_bombs(peer: HostilePeer) -> str:
    """A gigabyte of zeros in a message of a megabyte, twenty times."""
    bomb = deflated(bytes(2**30))[: LONGEST[Kind.MESSAGE]]
    return await _tell(peer, [frame(Kind.MESSAGE, bomb)] * 20)


async def message_flood(peer: HostilePeer) -> str:
    """Messages that make no sense, pings and tokens, as fast as they go."""
    some = frame(Kind.PING, bytes(8)) * 100 + frame(Kind.TOKEN, b"\x93" * 300) * 100
    some += frame(Kind.MESSAGE, deflated(msgpack.packb([0] * 1000)))
    _, writer = await peer.open_stream(peer.victim, peer.stream(CONTROL))
    writer.write(peer.greeting())
    sent, until = 0, time.monotonic() + 8.0
    with contextlib.suppress(Exception):
        while time.monotonic() < until and not writer.is_closing():
            writer.write(some)
            await asyncio.wait_for(writer.drain(), PACE)
            sent += len(some)
    writer.close()
    return f"{sent / 1e6:.0f} MB went"


async def greetings(peer: HostilePeer) -> str:
    """Thousands of streams that greet as a new process each, and go on to the next one."""
    calls = (peer.say(peer.victim, CONTROL, peer.greeting(), patience=3.0) for _ in range(3000))
    await peer.many(calls, at_once=64)
    return peer.summary()


async def junk_tokens(peer: HostilePeer) -> str:
    """Greetings and requests with tokens that are none: short, too long, and our own with one byte changed."""
    changed = bytearray(peer.token or bytes(600))

    def calls():
        for index in range(2000):
            changed[index % len(changed)] ^= 1 + index % 255
            token = bytes(changed) if index % 50 else bytes(60_000)
            yield peer.say(peer.victim, CONTROL, peer.greeting(token), patience=3.0)
            yield peer.say(peer.victim, BULK, peer.request(PART, b"", token), patience=3.0)

    await peer.many(calls(), at_once=64)
    return peer.summary()


async def stolen_token(peer: HostilePeer) -> str:
    """Our own good token, shown by somebody else."""
    thief = await P2P.create(initial_peers=[peer.victim.maddr], startup_timeout=60)
    try:
        own, peer.p2p = peer.p2p, thief
        for target in peer.with_nodes:
            await peer.say(target, CONTROL, peer.greeting())
            for name in REQUESTS:
                await peer.say(target, BULK, peer.request(name, b""))
        peer.p2p = own
    finally:
        await thief.shutdown()
    return peer.summary()


# --- bulk ---


async def odd_heads(peer: HostilePeer) -> str:
    """Requests with heads that say nothing, or a quarter of a megabyte of it; names that nobody has."""
    heads = [*words(), bytes(MAX_HEAD), messages.wide_array(MAX_HEAD - 16)]
    for target in peer.with_nodes:
        for name in (*REQUESTS, "nobody", "x" * 64):
            for head in heads:
                if peer.is_time_left and len(head) <= MAX_HEAD:
                    await peer.say(target, BULK, peer.request(name, head), patience=1.0)
    return peer.summary()


async def _pour(peer: HostilePeer, first: bytes, megabytes: int = 300) -> str:
    """So much behind this, if it is taken."""
    _, writer = await peer.open_stream(peer.victim, peer.stream(BULK))
    writer.write(first)
    sent, until, chunk = 0, time.monotonic() + 8.0, bytes(2**20)
    with contextlib.suppress(Exception):
        while time.monotonic() < until and sent < megabytes:
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), PACE)
            sent += 1
    await peer.hold(1.0)
    writer.close()
    return f"{sent} MB went"


async def long_head(peer: HostilePeer) -> str:
    """A request that says its head has four gigabytes, and 300 MB of it."""
    token = len(peer.token).to_bytes(2, "big") + peer.token
    return await _pour(peer, token + (2**32 - 3).to_bytes(4, "big"))


async def endless_part(peer: HostilePeer) -> str:
    """A part of no round, and frames of a megabyte behind it."""
    return await _pour(peer, peer.request(PART, b"\x93\xc4\x20" + bytes(32) + b"\x90\x90"), 100)


async def early_parts(peer: HostilePeer) -> str:
    """Hundreds of parts of rounds that nobody has begun, which wait to be taken."""
    opened = []

    async def one(number: int) -> None:
        _, writer = await peer.open_stream(peer.victim, peer.stream(BULK))
        writer.write(peer.request(PART, msgpack.packb([number.to_bytes(32, "big"), []])))
        opened.append(writer)

    await peer.many((one(number) for number in range(1000)), at_once=50)
    await peer.hold(6.0)
    for writer in opened:
        writer.close()
    return f"{len(opened)} open"


async def request_storm(peer: HostilePeer) -> str:
    """Thousands of requests at once."""
    wanted = msgpack.packb([[number.to_bytes(32, "big") for number in range(16)]])

    def calls():
        for index in range(5000):
            name = REQUESTS[index % len(REQUESTS)]
            yield peer.say(peer.victim, BULK, peer.request(name, wanted if name == ANSWERS else b""), patience=3.0)

    await peer.many(calls(), at_once=200)
    return peer.summary()


async def unread_states(peer: HostilePeer) -> str:
    """The state, a hundred times at once, of which nothing is read."""
    writers = []
    for _ in range(100):
        with contextlib.suppress(Exception):
            _, writer = await peer.open_stream(peer.victim, peer.stream(BULK))
            writer.write(peer.request(OFFER, b""))
            writers.append(writer)
    await peer.hold(5.0)
    for writer in writers:
        writer.close()
    return f"{len(writers)} open"


ATTACKS = [
    Attack("node-odd-messages", "node's messages", 1, odd_messages, (STRANGER, *BOTH), 30.0, is_quick=True),
    Attack("node-odd-frames", "node's messages", 1, odd_frames, BOTH, 30.0),
    Attack("node-bombs", "node's messages", 3, message_bombs, BOTH, 30.0, is_quick=True),
    Attack("node-flood", "node's messages", 5, message_flood, BOTH, 15.0),
    Attack("node-greetings", "node's messages", 5, greetings, BOTH, 12.0),
    Attack("node-junk-tokens", "access tokens", 5, junk_tokens, (STRANGER,), 12.0),
    Attack("node-stolen-token", "access tokens", 5, stolen_token, (MEMBER,)),
    Attack("bulk-odd-heads", "node's requests", 3, odd_heads, (STRANGER, *BOTH), 30.0, is_quick=True),
    Attack("bulk-long-head", "node's requests", 5, long_head, (STRANGER, OPEN), is_heavy=True),
    Attack("part-endless", "a round's parts", 3, endless_part, BOTH),
    Attack("part-early", "a round's parts", 5, early_parts, BOTH, 25.0, is_heavy=True),
    Attack("bulk-storm", "node's requests", 5, request_storm, (OPEN,), 12.0),
    Attack("states-unread", "a node's state", 5, unread_states, BOTH),
]
