"""Attacks on the authority and the dashboard over HTTP, from addresses other than the honest client's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from benchmarks.hostile_parts.attack import STRANGER, Attack
from benchmarks.hostile_parts.hostile_peer import HostilePeer

IDLE = 2050  # connections with half a header, to either server
HOLD = 18.0  # s; longer than a server may keep them
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HALF = b"GET /run.yaml HTTP/1.1\r\nHost: run\r\nX-Half: "


async def connect(url: str, source: str) -> Connection:
    at = urlsplit(url)
    opened = asyncio.open_connection(at.hostname, at.port, local_addr=(source, 0))
    return await asyncio.wait_for(opened, 5.0)


async def _hold_many(peer: HostilePeer, count: int, source: Callable[[int], str]) -> str:
    """Half a header on each of so many connections to both servers."""
    writers: list[asyncio.StreamWriter] = []
    for number in range(count):
        for url in (peer.authority, peer.dashboard):
            if peer.is_time_left:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    _, writer = await connect(url, source(number))
                    writer.write(HALF)
                    writers.append(writer)
    await peer.hold(HOLD)
    for writer in writers:
        writer.close()
    return f"{len(writers)} connected"


async def idle_connections(peer: HostilePeer) -> str:
    return await _hold_many(peer, IDLE, lambda number: "127.0.0.3")


async def idle_from_many(peer: HostilePeer) -> str:
    """From forty addresses, fifty connections each."""
    return await _hold_many(peer, IDLE, lambda number: f"127.0.1.{1 + number % 40}")


async def dripping_headers(peer: HostilePeer) -> str:
    """A byte a second of a header that never ends."""
    return await _drip(peer, HALF)


async def dripping_bodies(peer: HostilePeer) -> str:
    """Whole headers, and a body that comes a byte a second."""
    head = b"POST /v1/join HTTP/1.1\r\nHost: run\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    return await _drip(peer, head)


async def _drip(peer: HostilePeer, head: bytes) -> str:
    writers = []
    for number in range(600):
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            url = (peer.authority, peer.dashboard)[number % 2]
            _, writer = await connect(url, f"127.0.0.{3 + number % 3}")
            writer.write(head)
            writers.append(writer)
    until = min(peer.deadline - 1.0, time.monotonic() + 10.0)
    while time.monotonic() < until:
        for writer in writers:
            with contextlib.suppress(Exception):
                writer.write(b"a")
        await asyncio.sleep(1.0)
    alive = sum(not writer.is_closing() for writer in writers)
    for writer in writers:
        writer.close()
    return f"{len(writers)} connected, {alive} alive at the end"


async def deep_json(peer: HostilePeer) -> str:
    """Nested a hundred thousand levels, wide, and with numbers of a hundred thousand digits, at each address."""
    bodies = [b"[" * 100_000, b'{"a":' * 50_000, b'{"run_id":' + b"[" * 60_000 + b"]" * 60_000 + b"}"]
    bodies += [b'{"time":' + b"9" * 100_000 + b"}", json.dumps({"run_id": "x" * 60_000}).encode(), b"\xff" * 60_000]
    paths = ("/v1/join", "/v1/refresh", "/v1/convict", "/v1/moderate/session", "/v1/moderate/ban")
    said = []
    for path in paths:
        for body in bodies:
            said.append(await _ask(peer.authority, path, body))
    return ", ".join(f"{said.count(status)} x {status}" for status in sorted(set(said)))


async def long_requests(peer: HostilePeer) -> str:
    """Megabytes of headers, of an address, and bodies without an end."""
    said = []
    for url in (peer.authority, peer.dashboard):
        said.append(await _ask(url, "/" + "a" * 2_000_000, b""))
        said.append(await _ask(url, "/", b"", headers=b"X-Long: " + b"a" * 5_000_000 + b"\r\n"))
        said.append(await _ask(url, "/", b"", headers=b"X: y\r\n" * 300_000))
        said.append(await _endless_body(url))
    return ", ".join(f"{said.count(status)} x {status}" for status in sorted(set(said)))


async def _ask(url: str, path: str, body: bytes, headers: bytes = b"") -> str:
    """:returns: the status, or how the connection ended"""
    method = b"POST" if body else b"GET"
    head = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: run\r\nContent-Type: application/json\r\n" + headers
    head += b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        reader, writer = await connect(url, "127.0.0.4")
        try:
            writer.write(head + body)
            line = await asyncio.wait_for(reader.readline(), 10.0)
            return line.split()[1].decode() if line.count(b" ") else "closed"
        finally:
            writer.close()
    return "closed"


async def _endless_body(url: str) -> str:
    head = b"POST /v1/join HTTP/1.1\r\nHost: run\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n" % 2**20 + bytes(2**20) + b"\r\n"
    sent = 0
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        _, writer = await connect(url, "127.0.0.4")
        writer.write(head)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            while sent < 200:
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), 3.0)
                sent += 1
        writer.close()
    return "MB taken" if sent >= 200 else "ended"


async def unread_answers(peer: HostilePeer) -> str:
    """Hundreds of requests on each of a hundred connections, of whose answers nothing is read."""
    writers = []
    for number in range(200):
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            url, path = ((peer.authority, b"/run.yaml"), (peer.dashboard, b"/"))[number % 2]
            _, writer = await connect(url, f"127.0.0.{5 + number % 2}")
            writer.transport.pause_reading()
            writer.write((b"GET " + path + b" HTTP/1.1\r\nHost: run\r\n\r\n") * 300)
            writers.append(writer)
    await peer.hold(6.0)
    for writer in writers:
        writer.close()
    return f"{len(writers)} connected"


async def join_storm(peer: HostilePeer) -> str:
    """Joins with no good proof and logins that the Hub would have to be asked for, as fast as they go."""
    body = {"run_id": "r", "public_key": "x" * 500, "time": int(time.time()), "proof": "y" * 300, "scope": None}
    said: list[str] = []

    async def one(number: int) -> None:
        said.append(await _ask(peer.authority, "/v1/join", json.dumps({**body, "hf_token": f"hf_{number}"}).encode()))

    await peer.many((one(number) for number in range(2000)), at_once=50)
    return ", ".join(f"{said.count(status)} x {status}" for status in sorted(set(said)))


SERVERS = "authority and dashboard"
ATTACKS = [
    Attack("http-idle", SERVERS, 6, idle_connections, (STRANGER,), 45.0, True, is_quick=True),
    Attack("http-idle-from-many", SERVERS, 6, idle_from_many, (STRANGER,), 45.0, is_heavy=True),
    Attack("http-dripping-headers", SERVERS, 6, dripping_headers, (STRANGER,), 20.0),
    Attack("http-dripping-bodies", SERVERS, 6, dripping_bodies, (STRANGER,), 20.0),
    Attack("http-deep-json", "authority", 6, deep_json, (STRANGER,)),
    Attack("http-long-requests", SERVERS, 6, long_requests, (STRANGER,), 30.0),
    Attack("http-unread-answers", SERVERS, 6, unread_answers, (STRANGER,), 20.0),
    Attack("http-join-storm", "authority", 6, join_storm, (STRANGER,), 6.0, is_heavy=True),
]
