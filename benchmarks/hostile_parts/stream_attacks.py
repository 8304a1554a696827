"""Attacks below any message: streams and connections that are opened and say little or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time

from benchmarks.hostile_parts.attack import OPEN, STRANGER, Attack
from benchmarks.hostile_parts.hostile_peer import BULK, CONTROL, HostilePeer

SILENT = 3000  # streams
AT_ONCE = 50  # that are being opened
HOLD = 8.0  # s


def stream_handlers(peer: HostilePeer) -> list[str]:
    return [peer.stream(CONTROL), peer.stream(BULK)]


def unary_handlers(peer: HostilePeer) -> list[str]:
    return [peer.handler("dht", name) for name in ("rpc_ping", "rpc_store", "rpc_find")]


async def _open_many(peer: HostilePeer, handlers: list[str], count: int) -> tuple[list[asyncio.StreamWriter], int]:
    """:returns: those that were opened, and how many were refused"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    opened, refused = [], 0

    async def one(number: int) -> None:
        nonlocal refused
        try:
            _, writer = await peer.open_stream(peer.victim, handlers[number % len(handlers)])
            opened.append(writer)
        except Exception:
            refused += 1

    await peer.many((one(number) for number in range(count)), at_once=AT_ONCE)
    return opened, refused


async def silent_streams(peer: HostilePeer) -> str:
    """Not a byte in them."""
    opened, refused = await _open_many(peer, stream_handlers(peer), SILENT)
    await peer.hold(HOLD)
    for writer in opened:
        writer.close()
    return f"{len(opened)} opened, {refused} refused"


async def silent_calls(peer: HostilePeer) -> str:
    """The same to handlers of single messages, which p2pd itself reads."""
    opened, refused = await _open_many(peer, unary_handlers(peer), SILENT)
    await peer.hold(HOLD)
    for writer in opened:
        writer.close()
    return f"{len(opened)} opened, {refused} refused"


async def unknown_streams(peer: HostilePeer) -> str:
    """To handlers that nobody has, and to libp2p's own."""
    names = ["nobody::Nothing.rpc_none", "/ipfs/id/1.0.0", "/ipfs/kad/1.0.0", "/ipfs/ping/1.0.0", "x" * 60_000]
    opened, refused = await _open_many(peer, names, 1000)
    await peer.hold(4.0)
    for writer in opened:
        writer.close()
    return f"{len(opened)} opened, {refused} refused"


async def dripping_streams(peer: HostilePeer) -> str:
    """Three hundred streams that begin a message and send a byte a second of it."""
    opened, refused = await _open_many(peer, stream_handlers(peer), 300)
    until = min(peer.deadline - HOLD, time.monotonic() + 8.0)
    for writer in opened:
        writer.write((2000).to_bytes(4, "big"))
    while time.monotonic() < until:
        for writer in opened:
            with contextlib.suppress(Exception):
                writer.write(b"\x00")
        await asyncio.sleep(1.0)
    await peer.hold(2.0)
    alive = sum(not writer.is_closing() for writer in opened)
    for writer in opened:
        writer.close()
    return f"{len(opened)} opened, {refused} refused, {alive} alive"


async def broken_frames(peer: HostilePeer) -> str:
    """First frames that are none, of lengths that nobody takes, and streams that end in the middle of one."""
    shapes = [b"\x07" + bytes(40), bytes(4) + b"\xff" * 40, bytes(3), b"\xff" * 8 + bytes(10_000)]
    shapes += [(10**6).to_bytes(4, "big") + bytes(10), b"\x00\x00\x00\x22\x00" + b"\xff" * 34]
    sent = 0
    for handler in stream_handlers(peer):
        for data in shapes * 10:
            with contextlib.suppress(Exception):
                _, writer = await peer.open_stream(peer.victim, handler)
                writer.write(data)
                await writer.drain()
                writer.close()
                sent += 1
    return f"{sent} sent"


async def silent_sockets(peer: HostilePeer) -> str:
    """TCP connections to the peer's port, without a word of libp2p; half of them with some of it."""
    _, _, address, _, port, *_ = peer.victim.maddr.split("/")
    writers = []
    for number in range(1200):
        with contextlib.suppress(Exception):
            opened = asyncio.open_connection(address, int(port), local_addr=("127.0.0.9", 0))
            _, writer = await asyncio.wait_for(opened, 2.0)
            writers.append(writer)
            if number % 2:
                writer.write(b"\x13/multistream/1.0.0\n")
    await peer.hold(HOLD)
    for writer in writers:
        writer.close()
    return f"{len(writers)} connected"


ATTACKS = [
    Attack("streams-silent", "libp2p streams", 5, silent_streams, (STRANGER, OPEN), 40.0, True, is_quick=True),
    Attack("calls-silent", "libp2p streams", 5, silent_calls, (STRANGER, OPEN), 40.0, is_heavy=True),
    Attack("streams-unknown", "libp2p streams", 5, unknown_streams, (STRANGER,), 30.0, is_heavy=True),
    Attack("streams-dripping", "libp2p streams", 5, dripping_streams, (OPEN,), 30.0, is_heavy=True),
    Attack("streams-broken", "libp2p streams", 5, broken_frames, (OPEN,), 20.0),
    Attack("sockets-silent", "libp2p's port", 5, silent_sockets, (STRANGER,), 30.0, is_heavy=True),
]
