"""A peer of an attacker's: bare libp2p and raw bytes, with a token or without, and handlers that answer lies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from volunteer_kit.swarm.node.links import Hello, Kind
from volunteer_kit.swarm.node.transport import protocol

PATIENCE = 10.0  # s for one call
HEADER = 8  # bytes of a frame's length, after its marker
REGULAR, ENTRY = MSGPackSerializer.dumps(None), b""  # subkeys: of a plain value, of a whole dictionary
CONTROL, BULK = "control", "bulk"  # streams of a node


class Target:
    """An honest peer, as an attacker knows it."""

    def __init__(self, name: str, peer: str, maddr: str, node: bool):
        self.name, self.peer, self.maddr, self.node = name, PeerID.from_base58(peer), maddr, node


class HostilePeer:
    """
    :param targets: honest peers; the first one is the victim of what is sent to one only
    :param prefix: of the run's keys in the DHT, which names the nodes' streams, too
    :param protocol: what the run's DHT calls its handlers
    :param hold: awaited while connections are held open; returns when that has lasted long enough
    """

    def __init__(
        self,
        p2p: P2P,
        token: bytes,
        targets: list[Target],
        *,
        prefix: str,
        protocol: str,
        authority: str,
        dashboard: str,
        deadline: float,
        hold: Callable[[float], Awaitable[None]],
    ):
        self.p2p, self.token, self.targets, self.prefix, self.protocol = p2p, token, targets, prefix, protocol
        self.authority, self.dashboard = authority, dashboard
        self.deadline, self.hold = deadline, hold
        self.random = random.Random(0)
        self.said: Counter[str] = Counter()  # what became of the calls

    @property
    def victim(self) -> Target:
        return self.targets[0]

    @property
    def with_nodes(self) -> list[Target]:
        """Those that take part in rounds."""
        return [target for target in self.targets if target.node]

    @property
    def is_time_left(self) -> bool:
        return time.monotonic() < self.deadline

    @property
    def node(self) -> dht_pb2.NodeInfo:
        return dht_pb2.NodeInfo(node_id=DHTID.generate(self.p2p.peer_id.to_bytes()).to_bytes())

    def summary(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in self.said.most_common(3))

    async def connect(self) -> None:
        for target in self.targets:
            with contextlib.suppress(Exception):
                await self.p2p._client.connect(target.peer, [Multiaddr(target.maddr.partition("/p2p/")[0])])

    # --- calls ---

    def handler(self, kind: str, name: str) -> str:
        """Return the handler's name for a call of the DHT."""
        assert kind == "dht"
        return f"{self.protocol}.{name}"

    # --- a node's streams ---

    def stream(self, kind: str) -> str:
        """Return the name that p2pd has for such streams. :param kind: CONTROL or BULK"""
        return protocol(self.prefix, kind)

    def greeting(self, token: bytes | None = None) -> bytes:
        """Return the bytes that open a control stream."""
        hello = Hello(os.urandom(8), 1, token=self.token if token is None else token)
        return frame(Kind.HELLO, hello.encode())

    def request(self, name: str, head: bytes, token: bytes | None = None) -> bytes:
        """Return the bytes that open a bulk stream."""
        shown, named = self.token if token is None else token, name.encode()
        said = bytes([len(named)]) + named + head
        return len(shown).to_bytes(2, "big") + shown + len(said).to_bytes(4, "big") + said

    async def say(self, target: Target, kind: str, data: bytes, patience: float = 2.0) -> bytes:
        """Open a stream, say this, and take the first bytes of the answer. Counts how it went."""
        writer = None
        try:
            reader, writer = await self.open_stream(target, self.stream(kind))
            writer.write(data)
            await asyncio.wait_for(writer.drain(), patience)
            found = await asyncio.wait_for(reader.read(2**16), patience)
            self.said["answered" if found else "ended"] += 1
            return found
        except Exception as error:
            self.said[_in_a_word(error)] += 1
            return b""
        finally:
            if writer is not None:
                writer.close()

    # --- calls of the DHT ---

    async def unary(self, target: Target, handler: str, message: Any, patience: float = PATIENCE) -> bytes:
        """:param message: a protobuf, or bytes that may be none"""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return await asyncio.wait_for(self.p2p._client.call_unary_handler(target.peer, handler, data), patience)

    async def try_unary(self, target: Target, handler: str, message: Any, patience: float = PATIENCE) -> bytes | None:
        """Counts how it went. :returns: None if there was no answer"""
        try:
            found = await self.unary(target, handler, message, patience)
        except Exception as error:
            self.said[_in_a_word(error)] += 1
            return None
        self.said["answered"] += 1
        return found

    async def many(self, calls: Iterable[Awaitable[Any]], at_once: int = 32) -> None:
        """Until the attack's time is over."""
        running: set[asyncio.Task] = set()
        for call in calls:
            if not self.is_time_left:
                asyncio.ensure_future(call).cancel()
                break
            running.add(asyncio.ensure_future(call))
            if len(running) >= at_once:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.exception()
        if running:
            await asyncio.wait(running, timeout=max(0.1, self.deadline - time.monotonic()))
        for task in running:
            task.cancel()

    async def open_stream(self, target: Target, handler: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await asyncio.wait_for(self.p2p.call_binary_stream_handler(target.peer, handler), PATIENCE)
        return reader, writer

    # --- the DHT ---

    def signed(self, request: Any) -> Any:
        request.auth.client_access_token.signature = self.token
        return request

    def store_request(self, records: Iterable[tuple[bytes, bytes, bytes, float]], **more: Any) -> Any:
        """:param records: (key, subkey, value, expiration)"""
        keys, subkeys, values, expirations = (list(column) for column in zip(*records, strict=True))
        about = {"in_cache": [False] * len(keys), **more}
        return self.signed(
            dht_pb2.StoreRequest(keys=keys, subkeys=subkeys, values=values, expiration_time=expirations, **about)
        )

    async def store(
        self, target: Target, key: bytes, value: bytes, subkey: bytes = REGULAR, expiration: float | None = None
    ) -> None:
        """Counts how it went."""
        record = (key, subkey, value, get_dht_time() + 300 if expiration is None else expiration)
        found = await self.try_unary(target, self.handler("dht", "rpc_store"), self.store_request([record]))
        if found is not None:
            taken = list(dht_pb2.StoreResponse.FromString(found).store_ok)
            self.said["taken" if taken == [True] else "not taken"] += 1

    async def ping(self, target: Target, node: bytes | None = None, validate: bool = False) -> bytes | None:
        """With `node`, the other takes us for a node of that id."""
        info = None if node is None else dht_pb2.NodeInfo(node_id=node)
        request = self.signed(dht_pb2.PingRequest(peer=info, validate=validate))
        return await self.try_unary(target, self.handler("dht", "rpc_ping"), request)

    @staticmethod
    def key(name: str) -> bytes:
        return DHTID.generate(source=name).to_bytes()

    def own_subkey(self) -> bytes:
        """Under which a leader or donor stands: its bare peer id."""
        return MSGPackSerializer.dumps(self.p2p.peer_id.to_bytes())


def frame(kind: int, data: bytes) -> bytes:
    """Return a frame of a control stream."""
    return len(data).to_bytes(4, "big") + bytes([kind]) + data


def _in_a_word(error: BaseException) -> str:
    text = str(error)
    if "NotAdmitted" in text or "refused at" in text:
        return "refused"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer"
    return f"{type(error).__name__}: {text.strip()[:50]}" if text.strip() else type(error).__name__
