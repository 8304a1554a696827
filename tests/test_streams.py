"""Streams of a real p2pd: a stranger's silence, haste and lies end its own streams, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import dht_pb2

from volunteer_kit.swarm.net.streams import BoundedP2P, StreamBounds, fitting_bounds

HANDLER = "echo"
SHORT = StreamBounds(600, 2.0, 2.0, longest_message=100_000, per_peer=8, silent=4, total=10)
LONG = StreamBounds(600, 600, 600, longest_message=100_000, per_peer=8, silent=6, total=10)


async def echo(requests: AsyncIterator[dht_pb2.FindRequest], context: P2PContext) -> AsyncIterator[dht_pb2.FindRequest]:
    async for request in requests:
        yield request


@asynccontextmanager
async def swarm(bounds: StreamBounds, guests: int = 1) -> AsyncIterator[tuple[BoundedP2P, list[P2P]]]:
    """A bounded peer that answers, and plain ones that can call it."""
    async with AsyncExitStack() as stack:
        host = await BoundedP2P.create(startup_timeout=60)
        stack.push_async_callback(host.shutdown)
        host.streams.bounds = bounds
        await host.add_protobuf_handler(HANDLER, echo, dht_pb2.FindRequest, stream_input=True, stream_output=True)
        found = []
        for _ in range(guests):
            guest = await P2P.create(initial_peers=await host.get_visible_maddrs(), startup_timeout=60)
            stack.push_async_callback(guest.shutdown)
            await guest.wait_for_at_least_n_peers(1, attempts=60)
            found.append(guest)
        yield host, found


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 120))


async def call(guest: P2P, host: P2P, *words: bytes) -> list[bytes]:
    """What is echoed: an honest stream of one request for each word."""

    async def requests() -> AsyncIterator[dht_pb2.FindRequest]:
        for word in words:
            yield dht_pb2.FindRequest(keys=[word])

    stream = await guest.iterate_protobuf_handler(host.peer_id, HANDLER, requests(), dht_pb2.FindRequest)
    return [answer.keys[0] async for answer in stream]


async def opened(guest: P2P, host: P2P) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, reader, writer = await guest.call_binary_stream_handler(host.peer_id, HANDLER)
    return reader, writer


async def ends(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), 60) == b""


async def open_streams(host: BoundedP2P, count: int) -> None:
    """Wait until the host has so many."""
    while host.streams.open_streams != count:
        await asyncio.sleep(0.01)


def test_a_stream_that_says_nothing_is_closed():
    async def story():
        async with swarm(LONG._replace(first_message_within=0.5)) as (host, [guest]):
            reader, writer = await opened(guest, host)
            assert await ends(reader)
            await open_streams(host, 0)
            host.streams.bounds = LONG
            assert await call(guest, host, b"a", b"b") == [b"a", b"b"]
            writer.close()

    run(story)


def test_a_message_that_drips_is_cut_off():
    async def story():
        async with swarm(SHORT) as (host, [guest]):
            reader, writer = await opened(guest, host)
            word = dht_pb2.FindRequest(keys=[b"x"])
            await P2P.send_protobuf(word, writer)
            assert await P2P.receive_protobuf(dht_pb2.FindRequest, reader) == (word, None)
            writer.write(P2P.MESSAGE_MARKER + (50_000).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + b"begun")
            assert await ends(reader)
            await open_streams(host, 0)

    run(story)


def test_a_stream_may_be_idle_between_messages():
    async def story():
        async with swarm(SHORT) as (host, [guest]):
            resumed = asyncio.Event()

            async def requests() -> AsyncIterator[dht_pb2.FindRequest]:
                yield dht_pb2.FindRequest(keys=[b"a"])
                await resumed.wait()
                yield dht_pb2.FindRequest(keys=[b"b"])

            stream = await guest.iterate_protobuf_handler(host.peer_id, HANDLER, requests(), dht_pb2.FindRequest)
            assert (await stream.__anext__()).keys == [b"a"]
            await asyncio.sleep(3 * SHORT.message_within)  # longer than a message may take
            resumed.set()
            assert (await stream.__anext__()).keys == [b"b"]

    run(story)


@pytest.mark.parametrize("claimed", [100_001, 2**40, 2**63, 2**64 - 1])
def test_a_message_that_claims_to_be_huge_is_not_read(claimed):
    async def story():
        async with swarm(LONG) as (host, [guest]):
            reader, writer = await opened(guest, host)
            writer.write(P2P.MESSAGE_MARKER + claimed.to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
            assert await ends(reader)
            assert await call(guest, host, b"a" * 90_000) == [b"a" * 90_000]

    run(story)


def test_silent_streams_give_way_to_new_ones():
    async def story():
        async with swarm(LONG, guests=2) as (host, [stranger, guest]):
            silent = []
            for count in range(1, LONG.silent + 1):  # one after another: the host decides by the order that it sees
                silent.append(await opened(stranger, host))
                await open_streams(host, count)
            assert await call(guest, host, b"a") == [b"a"]
            assert await ends(silent[0][0]), "the oldest"
            for reader, writer in silent[1:]:
                assert not reader.at_eof()
                writer.close()

    run(story)


def test_a_peer_has_so_many_streams_and_no_more():
    async def story():
        async with swarm(LONG, guests=2) as (host, [stranger, guest]):
            kept = []
            for _ in range(LONG.per_peer):
                reader, writer = await opened(stranger, host)
                await P2P.send_protobuf(dht_pb2.FindRequest(keys=[b"x"]), writer)
                assert await P2P.receive_protobuf(dht_pb2.FindRequest, reader)
                kept.append((reader, writer))
            reader, _ = await opened(stranger, host)
            assert await ends(reader)
            assert await call(guest, host, b"a") == [b"a"]
            for _, writer in kept:
                writer.close()
            await open_streams(host, 0)

    run(story)


def test_a_peer_that_does_not_take_its_answers_is_hung_up_on():
    async def story():
        async with swarm(SHORT) as (host, [guest]):
            _, writer = await opened(guest, host)

            async def ask_on() -> None:  # until all buffers on the way are full
                while True:
                    await P2P.send_protobuf(dht_pb2.FindRequest(keys=[bytes(90_000)]), writer)

            asking = asyncio.create_task(ask_on())
            await open_streams(host, 1)
            await open_streams(host, 0)
            asking.cancel()

    run(story)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_ends_with_its_handler_whatever_its_caller_still_sends(fails):
    async def story():
        async with swarm(SHORT) as (host, [guest]):

            async def one_word(requests, context):
                async for _ in requests:
                    if fails:
                        raise ValueError("no word")
                    return
                yield dht_pb2.FindRequest()

            types = dict(stream_input=True, stream_output=True)
            await host.add_protobuf_handler("one", one_word, dht_pb2.FindRequest, **types)
            _, _, writer = await guest.call_binary_stream_handler(host.peer_id, "one")
            with pytest.raises(ConnectionError):
                while True:
                    await P2P.send_protobuf(dht_pb2.FindRequest(keys=[bytes(1000)]), writer)
            await open_streams(host, 0)

    run(story)


def test_a_long_answer_is_not_read():
    async def story():
        async with swarm(LONG) as (host, [guest]):

            async def lie(info, reader, writer):
                writer.write(P2P.MESSAGE_MARKER + (2**50).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
                await reader.read()

            await guest.add_binary_stream_handler("lie", lie)
            stream = await host.iterate_protobuf_handler(
                guest.peer_id, "lie", dht_pb2.FindRequest(), dht_pb2.FindRequest
            )
            assert [answer async for answer in stream] == []

    run(story)


def test_the_bounds_fit_to_the_files_that_a_process_may_open():
    bounds = fitting_bounds()
    assert bounds.silent < bounds.total <= 1024 and bounds.per_peer <= bounds.total
