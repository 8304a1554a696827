"""Attacks on the calls between averagers: groups, parts, states and questions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgpack
from hivemind.p2p import P2P
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from benchmarks.hostile_parts import messages
from benchmarks.hostile_parts.attack import MEMBER, OPEN, STRANGER, Attack
from benchmarks.hostile_parts.hostile_peer import GRADIENTS, QUESTIONS, STATE, HostilePeer
from benchmarks.hostile_parts.impostors import Lies

BOTH = (MEMBER, OPEN)
AFTER = 2.0  # s that a round has to end in our group; being followed takes most of an attack's time
Words = Callable[[averaging_pb2.JoinRequest], tuple[list[bytes], list[bytes]]]


# --- joining a group ---


async def nested_words(peer: HostilePeer) -> str:
    """Messages of a follower to its leader: nested itself, and in each place of a good entry."""
    good, bad = peer.entry(), messages.nested_word()
    places = [bad, messages.nested(), messages.deep_array()]
    places += [b"\x93" + bad + good[-40:], MSGPackSerializer.dumps([100.0, 0, bad])]
    places += [MSGPackSerializer.dumps([100.0, 0, msgpack.packb([None, peer.token])])[:-1] + bad]
    for kind in (GRADIENTS, STATE):
        for gather in places:
            handler = peer.handler(kind, "rpc_join_group")
            await peer.converse(peer.victim, handler, [peer.join_request(gather, kind)], patience=2.0)
    return peer.summary()


async def long_words(peer: HostilePeer) -> str:
    for kind in (GRADIENTS, STATE):
        for gather in (bytes(4_000_000), messages.wide_array(), MSGPackSerializer.dumps([1e308, 0, b"\x01"])):
            handler = peer.handler(kind, "rpc_join_group")
            await peer.converse(peer.victim, handler, [peer.join_request(gather, kind)], patience=2.0)
        odd = peer.join_request(peer.entry(), kind, expiration=float("nan"), group_key="\x00" * 2**20)
        await peer.converse(peer.victim, peer.handler(kind, "rpc_join_group"), [odd], patience=2.0)
    return peer.summary()


async def crowd_of_followers(peer: HostilePeer) -> str:
    """Hundreds of requests that never end."""

    async def knock() -> None:
        request = peer.join_request(peer.entry(), expiration=get_dht_time() + 1e6)
        await peer.converse(peer.victim, peer.handler(GRADIENTS, "rpc_join_group"), [request], patience=6.0)

    await peer.many((knock() for _ in range(600)), at_once=300)
    return peer.summary()


# --- leading one ---


async def lead(peer: HostilePeer, words: Words) -> Lies | None:
    """Be somebody's leader. :returns: None: nobody has followed"""
    lies = Lies(peer)
    own = peer.p2p.peer_id.to_bytes()

    def gathered(request: averaging_pb2.JoinRequest, follower: bytes) -> tuple[list[bytes], list[bytes]]:
        peers, told = words(request)
        return [follower, own, *peers], [request.gather, *told]

    lies.gathered = gathered
    await lies.serve()
    return lies if await peer.be_followed(lambda: lies.called["led"] > 0) else None


async def nested_group(peer: HostilePeer) -> str:
    """Lists in which a leader passes on what members said."""
    led = await lead(peer, lambda request: ([], [messages.nested_word()]))
    await asyncio.sleep(AFTER)
    return f"followed {led.called['led']} times" if led else "nobody followed"


async def large_group(peer: HostilePeer) -> str:
    """A hundred thousand members, of which all tell kilobytes."""
    ids = [b"\x12\x20" + index.to_bytes(32, "big") for index in range(50_000)]
    led = await lead(peer, lambda request: (ids, [peer.entry()] + [bytes(40)] * 50_000))
    await asyncio.sleep(AFTER)
    return f"followed {led.called['led']} times" if led else "nobody followed"


async def _send_parts(peer: HostilePeer, tensors: list[runtime_pb2.Tensor], repeat: int = 1) -> str:
    """Lead somebody into a group of two; then send these as our parts, and as the averages of its own."""
    lies, said = Lies(peer), []
    own, entry = peer.p2p.peer_id.to_bytes(), peer.entry()
    await lies.serve()
    for tensor in tensors:
        if not peer.is_time_left:
            break
        lies.average, lies.group = [messages.answer(tensor)] * repeat, None
        lies.gathered = lambda request, follower: ([follower, own], [request.gather, entry])
        if not await peer.be_followed(lambda: lies.group is not None):
            return "; ".join([*said, "nobody followed"])
        target = next(each for each in peer.targets if each.peer.to_bytes() == lies.follower)
        parts = [messages.part(tensor, lies.group)] * repeat
        handler = peer.handler(GRADIENTS, "rpc_aggregate_part")
        await peer.converse(target, handler, parts, answers=repeat, patience=AFTER)
        said.append(peer.summary())
        peer.said.clear()
        lies.gathered = None
    return "; ".join(said)


async def sizes_50k(peer: HostilePeer) -> str:
    return await _send_parts(peer, [messages.many_sizes(50_000)])


async def sizes_250k(peer: HostilePeer) -> str:
    return await _send_parts(peer, [messages.many_sizes(250_000)])


async def long_dtypes(peer: HostilePeer) -> str:
    return await _send_parts(peer, [messages.long_dtype(1)])


async def sparse_bombs(peer: HostilePeer) -> str:
    return await _send_parts(peer, [messages.sparse_bomb()], repeat=20)


async def odd_parts(peer: HostilePeer) -> str:
    """One after another in one stream; the first that is refused ends it, so the order is drawn."""
    tensors = messages.odd_tensors() + [messages.sparse_zeros()]
    peer.random.shuffle(tensors)
    return await _send_parts(peer, tensors[:3])


async def parts_without_group(peer: HostilePeer) -> str:
    """The same tensors, in no group at all, to both averagers."""
    bad = [messages.many_sizes(50_000), messages.long_dtype(1), messages.sparse_bomb(), *messages.odd_tensors()]
    for kind in (GRADIENTS, STATE):
        for tensor in bad:
            if peer.is_time_left:
                parts = [messages.part(tensor, b"no group")]
                await peer.converse(peer.victim, peer.handler(kind, "rpc_aggregate_part"), parts, patience=0.5)
    return peer.summary()


async def endless_parts(peer: HostilePeer) -> str:
    """Parts of a megabyte, as fast as they go, in no group: are they kept?"""
    part = messages.part(messages.tensor(buffer=bytes(2**20), size=[2**20]), b"no group")
    _, writer = await peer.open_stream(peer.victim, peer.handler(GRADIENTS, "rpc_aggregate_part"))
    sent, until = 0, time.monotonic() + 6.0
    with contextlib.suppress(Exception):
        while time.monotonic() < until and sent < 400:
            await asyncio.wait_for(P2P.send_protobuf(part, writer), 2.0)
            sent += 1
    writer.close()
    return f"{sent} MB went"


async def long_frame(peer: HostilePeer) -> str:
    """A frame that says it is a terabyte long, and 300 MB of it."""
    _, writer = await peer.open_stream(peer.victim, peer.handler(GRADIENTS, "rpc_aggregate_part"))
    writer.write(P2P.MESSAGE_MARKER + (2**40).to_bytes(8, "big"))
    sent, until, chunk = 0, time.monotonic() + 8.0, bytes(2**20)
    with contextlib.suppress(Exception):
        while time.monotonic() < until and sent < 300:
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), 2.0)
            sent += 1
    await peer.hold(1.0)
    writer.close()
    return f"{sent} MB went"


# --- questions, states ---


async def nested_questions(peer: HostilePeer) -> str:
    """In each question an averager answers, nested words in each place."""
    bad = messages.nested_word()
    for kind, name in QUESTIONS:
        shapes = (bad, messages.nested(), b"\x92" + bad + b"\x00", b"\x93" + bad * 3, b"\x93\xc4\x01\x01" + bad * 2)
        for metadata in (*shapes, messages.deep_array(), messages.deep_map()):
            request = averaging_pb2.DownloadData(metadata=metadata)
            await peer.try_unary(peer.victim, peer.handler(kind, name), request, 3.0)
    return peer.summary()


async def odd_questions(peer: HostilePeer) -> str:
    """Words of other types, numbers out of all bounds, megabytes, and tensors where none belong."""
    words = [
        [{}, 0], [[], [], []], [None] * 3, [b"r" * 32, 2**63], [b"r" * 32, -(2**63)], [b"r", 0, float("nan")],
        [b"r", 0, 1e308], [bytes(3_000_000), 0, 0], [b"r", {}, {}], "text", 7, [[b"x"] * 100_000, 0, 0],
    ]  # fmt: skip
    for kind, name in QUESTIONS:
        for word in words:
            request = averaging_pb2.DownloadData(metadata=msgpack.packb(word), tensor_part=messages.many_sizes(5000))
            await peer.try_unary(peer.victim, peer.handler(kind, name), request, 3.0)
        for data in (messages.promised_array(), messages.wide_array(), b"", bytes(3_900_000)):
            request = averaging_pb2.DownloadData(metadata=data)
            await peer.try_unary(peer.victim, peer.handler(kind, name), request, 3.0)
    return peer.summary()


async def question_storm(peer: HostilePeer) -> str:
    """Thousands of questions at once, which ask to be kept waiting."""
    words = msgpack.packb([b"r" * 36, 0, 1e9])

    def calls():
        for index in range(5000):
            kind, name = QUESTIONS[index % len(QUESTIONS)]
            request = averaging_pb2.DownloadData(metadata=words)
            yield peer.try_unary(peer.victim, peer.handler(kind, name), request, 5.0)

    await peer.many(calls(), at_once=200)
    return peer.summary()


async def unread_states(peer: HostilePeer) -> str:
    """The state, a hundred times at once, of which nothing is read."""
    streams = []
    for _ in range(100):
        with contextlib.suppress(Exception):
            reader, writer = await peer.open_stream(peer.victim, peer.handler(STATE, "rpc_download_state"))
            await P2P.send_protobuf(averaging_pb2.DownloadRequest(), writer)
            await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
            streams.append((reader, writer))
    await peer.hold(5.0)
    for _, writer in streams:
        writer.close()
    return f"{len(streams)} open"


async def junk_tokens(peer: HostilePeer) -> str:
    """Introductions with tokens that are none: short, megabytes, and our own with one byte changed."""
    changed = bytearray(peer.token or bytes(600))

    def calls():
        for index in range(3000):
            changed[index % len(changed)] ^= 1 + index % 255
            token = bytes(changed) if index % 50 else bytes(2_000_000)
            request = peer.introduction()
            request.signature = token
            yield peer.try_unary(peer.victim, peer.handler(STATE, "rpc_introduce"), request, 5.0)

    await peer.many(calls(), at_once=64)
    return peer.summary()


async def junk_calls(peer: HostilePeer) -> str:
    for kind, name in (*QUESTIONS, (GRADIENTS, "rpc_introduce"), (STATE, "rpc_introduce")):
        for data in (b"\xff" * 3_900_000, b"\x0a" * 3_900_000):
            await peer.try_unary(peer.victim, peer.handler(kind, name), data, 3.0)
    return peer.summary()


ATTACKS = [
    Attack("join-nested-words", "join-group", 1, nested_words, (STRANGER, *BOTH), 30.0, is_quick=True),
    Attack("join-long-words", "join-group", 1, long_words, (MEMBER,)),
    Attack("join-crowd", "join-group", 5, crowd_of_followers, (MEMBER,), 12.0),
    Attack("lead-nested-group", "leader's answer", 1, nested_group, BOTH, 40.0),
    Attack("lead-large-group", "leader's answer", 1, large_group, (MEMBER,), 40.0),
    Attack("part-50000-sizes", "aggregate-part", 3, sizes_50k, BOTH, 40.0, is_quick=True),
    Attack("part-250000-sizes", "aggregate-part", 3, sizes_250k, (MEMBER,), 40.0),
    Attack("part-long-dtype", "aggregate-part", 3, long_dtypes, (MEMBER,), 40.0),
    Attack("part-sparse-bomb", "aggregate-part", 3, sparse_bombs, (MEMBER,), 40.0),
    Attack("part-odd-tensors", "aggregate-part", 3, odd_parts, (MEMBER,), 40.0),
    Attack("part-without-group", "aggregate-part", 3, parts_without_group, BOTH),
    Attack("part-endless", "aggregate-part", 3, endless_parts, (MEMBER,)),
    Attack("stream-long-frame", "aggregate-part", 5, long_frame, (STRANGER, OPEN), is_heavy=True),
    Attack("questions-nested", "questions to averagers", 1, nested_questions, (STRANGER, *BOTH), 30.0, is_quick=True),
    Attack("questions-odd", "questions to averagers", 3, odd_questions, (MEMBER,), 30.0),
    Attack("questions-storm", "questions to averagers", 5, question_storm, (OPEN,), 10.0),
    Attack("states-unread", "download-state", 5, unread_states, (MEMBER,)),
    Attack("introduce-junk", "introduce", 5, junk_tokens, (STRANGER,), 8.0),
    Attack("averager-junk", "questions to averagers", 5, junk_calls, (STRANGER,), 30.0),
]
