"""Somebody at the swarm's door, a process of his own: bare hivemind P2P, and of the kit how a first message looks.

argv[1]: JSON {"maddrs", "identity"}. stdin: one order in JSON a line, answered by an event "answer":
{"do": "show", "token": hex}: from now on, in calls and answers; {"do": "call", "servicer", "kind", "peer"}: one of the
DHT ("dht"), or of a node's streams ("node"); {"do": "called"}: how often each of his own handlers was called.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from volunteer_kit.swarm.node.links import Hello, Kind
from volunteer_kit.swarm.node.transport import protocol

RUN = "test"  # key of the swarm's nodes
HELLO = int(Kind.HELLO)
PATIENCE = 15.0  # s for one call
JUNK = b"\x01"
REGULAR = MSGPackSerializer.dumps(None)  # subkey of a record that is no dictionary
called: Counter[str] = Counter()
shown = {"token": b""}


def signed(answer: Any) -> Any:
    answer.auth.service_access_token.signature = shown["token"]
    return answer


# The names are those of the kit's classes, for libp2p finds handlers by them; nothing else of theirs is here.


class AdmittedDHTProtocol(ServicerBase):
    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        called["rpc_ping"] += 1
        return signed(dht_pb2.PingResponse(peer=node(context.local_id), dht_time=get_dht_time(), available=True))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        called["rpc_store"] += 1
        return signed(dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=node(context.local_id)))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        called["rpc_find"] += 1
        found = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return signed(dht_pb2.FindResponse(results=[found] * len(request.keys), peer=node(context.local_id)))


def node(peer: PeerID) -> dht_pb2.NodeInfo:
    return dht_pb2.NodeInfo(node_id=DHTID.generate(peer.to_bytes()).to_bytes())


class Stranger:
    def __init__(self, p2p: P2P):
        self.p2p = p2p

    async def serve(self) -> None:
        await AdmittedDHTProtocol().add_p2p_handlers(self.p2p)

    async def show(self, token: str) -> dict:
        shown["token"] = bytes.fromhex(token)
        return {}

    async def called(self) -> dict:
        return {"called": dict(called)}

    async def call(self, servicer: str, kind: str, peer: str, **more: Any) -> dict:
        """:returns: {"got": what came back, in words, or null} and {"why": the error}"""
        made = self._call_node if servicer == "dht" else self._call_stream
        try:
            return {"got": await asyncio.wait_for(made(servicer, kind, PeerID.from_base58(peer), **more), PATIENCE)}
        except BaseException as error:
            return {"got": None, "why": repr(error)[:500]}

    async def _call_node(self, servicer: str, kind: str, peer: PeerID, key: str = "junk") -> str:
        key_id, info = DHTID.generate(key).to_bytes(), node(self.p2p.peer_id)
        request = {
            "rpc_ping": dht_pb2.PingRequest(peer=info),
            "rpc_find": dht_pb2.FindRequest(keys=[key_id], peer=info),
            "rpc_store": dht_pb2.StoreRequest(
                keys=[key_id], subkeys=[REGULAR], values=[JUNK], expiration_time=[get_dht_time() + 60],
                in_cache=[False], peer=info,
            ),
        }[kind]  # fmt: skip
        request.auth.client_access_token.signature = shown["token"]
        stub = AdmittedDHTProtocol.get_stub(self.p2p, peer)
        answer = await getattr(stub, kind)(request)
        if kind == "rpc_store":
            return "stored" if list(answer.store_ok) == [True] else "not stored"
        return f"{answer.ByteSize()} bytes"

    async def _call_stream(self, servicer: str, kind: str, peer: PeerID, name: str = "") -> str | None:
        """Open a stream of the node's, show the token as the first message does, and wait for a word back.

        :param kind: control or bulk; :param name: of a bulk request
        """
        token = shown["token"]
        if kind == "control":
            hello = Hello(os.urandom(8), 1, token=token).encode()
            first = len(hello).to_bytes(4, "big") + bytes([HELLO]) + hello
        else:
            named = name.encode()
            request = bytes([len(named)]) + named
            first = len(token).to_bytes(2, "big") + token + len(request).to_bytes(4, "big") + request
        _, reader, writer = await self.p2p.call_binary_stream_handler(peer, protocol(RUN, kind))
        try:
            writer.write(first)
            await writer.drain()
            data = await reader.read(4)
            return f"{len(data)} bytes" if data else None
        finally:
            writer.close()


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    settings = json.loads(sys.argv[1])
    p2p = await P2P.create(
        initial_peers=settings["maddrs"], identity_path=settings["identity"], startup_timeout=60,
        check_if_identity_free=False,
    )  # fmt: skip
    stranger = Stranger(p2p)
    await stranger.serve()
    say("connected", peer_id=str(p2p.peer_id))
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        say("answer", number=number, **await getattr(stranger, order.pop("do"))(**order))
        number += 1
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
