"""Handlers of the names that the kit's own have, with lies for answers. They are registered for the attacks that need
them, and count who calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from benchmarks.hostile_parts.hostile_peer import HostilePeer


class Lies:
    """Answers of the handlers, and how often each was called.

    :param find: the results of rpc_find, for a request; None: nothing is found
    :param find_after: draws the seconds until rpc_find is answered
    """

    def __init__(self, peer: HostilePeer):
        self.peer = peer
        self.called: Counter[str] = Counter()
        self.find: Callable[[dht_pb2.FindRequest], list[dht_pb2.FindResult]] | None = None
        self.find_after: Callable[[], float] = float
        self.node_id = DHTID.generate().to_bytes()

    async def serve(self) -> None:
        protocol = _node_class(self, self.peer.protocol)
        await protocol().add_p2p_handlers(self.peer.p2p)


def _node_class(lies: Lies, name: str) -> type[ServicerBase]:
    def signed(answer: Any) -> Any:
        answer.auth.service_access_token.signature = lies.peer.token
        return answer

    class Node(ServicerBase):
        async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
            lies.called["ping"] += 1
            info = dht_pb2.NodeInfo(node_id=lies.node_id)
            return signed(dht_pb2.PingResponse(peer=info, dht_time=get_dht_time(), available=True))

        async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
            lies.called["store"] += 1
            info = dht_pb2.NodeInfo(node_id=lies.node_id)
            return signed(dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=info))

        async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            lies.called["find"] += 1
            nothing = [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)] * len(request.keys)
            found = nothing if lies.find is None else lies.find(request)
            await asyncio.sleep(lies.find_after())
            return signed(dht_pb2.FindResponse(results=found, peer=dht_pb2.NodeInfo(node_id=lies.node_id)))

    Node.__name__ = name
    return Node
