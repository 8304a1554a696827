"""A peer of an attacker's: bare libp2p and raw protobufs, with a token or without, and handlers that answer lies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import auth_pb2, averaging_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.multiaddr import Multiaddr

PATIENCE = 10.0  # s for one call
HEADER = 8  # bytes of a frame's length, after its marker
REGULAR, ENTRY = MSGPackSerializer.dumps(None), b""  # subkeys: of a plain value, of a whole dictionary
GRADIENTS, STATE = "SwarmGradientAverager", "SwarmStateAverager"
QUESTIONS = (  # unary calls of averagers, with [class, name]
    (STATE, "rpc_get_chunk"), (STATE, "rpc_get_told"), (GRADIENTS, "rpc_tell"), (GRADIENTS, "rpc_show_part"),
    (GRADIENTS, "rpc_count_answers"), (GRADIENTS, "rpc_show_answer"), (GRADIENTS, "rpc_show_round"),
)  # fmt: skip
STREAMS = ("rpc_join_group", "rpc_aggregate_part", "rpc_download_state")


class Target:
    """An honest peer, as an attacker knows it."""

    def __init__(self, name: str, peer: str, maddr: str, averagers: bool):
        self.name, self.peer, self.maddr, self.averagers = name, PeerID.from_base58(peer), maddr, averagers


class HostilePeer:
    """
    :param targets: honest peers; the first one is the victim of what is sent to one only
    :param prefix: of the run's keys in the DHT
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
        if self.token:
            for target in self.targets:
                if target.averagers:
                    for kind in (GRADIENTS, STATE):
                        await self.try_unary(target, self.handler(kind, "rpc_introduce"), self.introduction())
            self.said.clear()

    def introduction(self) -> auth_pb2.AccessToken:
        return auth_pb2.AccessToken(signature=self.token)

    # --- calls ---

    def handler(self, kind: str, name: str) -> str:
        if kind == "dht":
            return f"{self.protocol}.{name}"
        averager = "grad" if kind == GRADIENTS else "state"
        return f"{self.prefix}_{averager}_averager::{kind}.{name}"

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

    async def converse(
        self, target: Target, handler: str, messages: Iterable[Any], answers: int = 1, patience: float = PATIENCE
    ) -> list[averaging_pb2.AveragingData]:
        """Send messages over a stream, end it on our side, and take the first answers."""
        reader, writer = await self.open_stream(target, handler)
        found: list[Any] = []
        try:
            for message in messages:
                await P2P.send_protobuf(message, writer)
            await P2P.send_protobuf(P2P.END_OF_STREAM, writer)  # else a handler of one message waits for more
            for _ in range(answers):
                got = P2P.receive_protobuf(averaging_pb2.AveragingData, reader)
                message, error = await asyncio.wait_for(got, patience)
                if message is None:
                    self.said[_in_a_word(RuntimeError(error.message))] += 1
                    break
                found.append(message)
                self.said[averaging_pb2.MessageCode.Name(message.code)] += 1
        except Exception as error:
            self.said[_in_a_word(error)] += 1
        finally:
            writer.close()
        return found

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

    # --- groups ---

    def entry(self, words: Any = None) -> bytes:
        """A member's message to its group."""
        return MSGPackSerializer.dumps([100.0, 0, MSGPackSerializer.dumps([words, self.token])])

    def join_request(self, gather: bytes, kind: str = GRADIENTS, **more: Any) -> averaging_pb2.JoinRequest:
        averager = "grad" if kind == GRADIENTS else "state"
        about = {"schema_hash": b"none", "expiration": get_dht_time() + 30, "gather": gather}
        return averaging_pb2.JoinRequest(**{**about, "group_key": f"{self.prefix}_{averager}_averager.0b", **more})

    async def be_followed(self, is_followed: Callable[[], bool]) -> bool:
        """Say in the DHT that we look for a group, until somebody has come."""
        key = self.key(f"{self.prefix}_grad_averager.0b")
        while self.is_time_left and not is_followed():
            record = (key, self.own_subkey(), MSGPackSerializer.dumps(True), get_dht_time() + 0.9)
            request = self.store_request([record], peer=self.node)
            for target in self.targets:
                with contextlib.suppress(Exception):
                    await self.unary(target, self.handler("dht", "rpc_store"), request, 2.0)
            await asyncio.sleep(0.25)
        return is_followed()


def exchange_id(group: bytes, peers: Iterable[bytes], gathered: Iterable[bytes]) -> bytes:
    """Under which the members of a group exchange parts; see volunteer_kit/swarm/told_group.py."""
    hasher = hashlib.blake2b(digest_size=16)
    for words in (group, *peers, *gathered):
        hasher.update(len(words).to_bytes(8, "little") + words)
    return group + hasher.digest()


async def one(message: Any) -> AsyncIterator[Any]:
    yield message


def _in_a_word(error: BaseException) -> str:
    text = str(error)
    if "NotAdmitted" in text or "refused at" in text:
        return "refused"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer"
    return f"{type(error).__name__}: {text.strip()[:50]}" if text.strip() else type(error).__name__
