"""Handlers of the names that the kit's own have, with lies for answers. They are registered for the attacks that need
them, and count who calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import auth_pb2, averaging_pb2, dht_pb2
from hivemind.utils import get_dht_time

from benchmarks.hostile_parts.hostile_peer import GRADIENTS, STATE, HostilePeer, exchange_id

LINGER = 2.0  # s; p2pd resets a stream that is closed by its answering side, and what was not read by then is lost


class Lies:
    """Answers of the handlers, and how often each was called.

    :param find: the results of rpc_find, for a request; None: nothing is found
    :param find_after: draws the seconds until rpc_find is answered
    :param gathered: of rpc_join_group: ids and words of the group's members, for a request; None: no group
    :param average: messages of rpc_aggregate_part, when somebody sends us parts
    :param state: messages of rpc_download_state
    """

    def __init__(self, peer: HostilePeer):
        self.peer = peer
        self.called: Counter[str] = Counter()
        self.find: Callable[[dht_pb2.FindRequest], list[dht_pb2.FindResult]] | None = None
        self.find_after: Callable[[], float] = float
        self.gathered: Callable[[averaging_pb2.JoinRequest, bytes], tuple[list[bytes], list[bytes]]] | None = None
        self.average: list[averaging_pb2.AveragingData] = []
        self.state: list[averaging_pb2.DownloadData] = []
        self.node_id = DHTID.generate().to_bytes()
        self.group: bytes | None = None  # the id of the last group's exchange
        self.follower: bytes | None = None

    async def serve(self) -> None:
        protocol = _node_class(self, self.peer.protocol)
        await protocol().add_p2p_handlers(self.peer.p2p)
        for kind, averager in ((GRADIENTS, "grad"), (STATE, "state")):
            prefix = f"{self.peer.prefix}_{averager}_averager"
            await _averager_class(self, kind)().add_p2p_handlers(self.peer.p2p, namespace=prefix)


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


def _averager_class(lies: Lies, name: str) -> type[ServicerBase]:
    class Averager(ServicerBase):
        async def rpc_introduce(self, request: auth_pb2.AccessToken, context: P2PContext) -> auth_pb2.AccessToken:
            lies.called["introduce"] += 1
            return auth_pb2.AccessToken(signature=lies.peer.token)

        async def rpc_join_group(
            self, request: averaging_pb2.JoinRequest, context: P2PContext
        ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
            lies.called["join_group"] += 1
            if lies.gathered is None:
                yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
                return
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
            peers, words = lies.gathered(request, context.remote_id.to_bytes())
            group = DHTID.generate().to_bytes()
            lies.group, lies.follower = exchange_id(group, peers, words), context.remote_id.to_bytes()
            lies.called["led"] += 1
            yield averaging_pb2.MessageFromLeader(
                code=averaging_pb2.BEGIN_ALLREDUCE, group_id=group, ordered_peer_ids=peers, gathered=words
            )
            await asyncio.sleep(LINGER)

        async def rpc_aggregate_part(
            self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
        ) -> AsyncIterator[averaging_pb2.AveragingData]:
            lies.called["aggregate_part"] += 1
            for message in lies.average:
                yield message
            await asyncio.sleep(LINGER)

        async def rpc_download_state(
            self, request: averaging_pb2.DownloadRequest, context: P2PContext
        ) -> AsyncIterator[averaging_pb2.DownloadData]:
            lies.called["download_state"] += 1
            for message in lies.state:
                yield message
            await asyncio.sleep(LINGER)

    Averager.__name__ = name
    return Averager
