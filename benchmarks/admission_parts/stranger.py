"""Somebody at the swarm's door, a process of his own: bare hivemind P2P, none of the kit's code between him and it.

argv[1]: JSON {"maddrs", "identity"}. stdin: one order in JSON a line, answered by an event "answer":
{"do": "show", "token": hex}: from now on, in calls and answers; {"do": "call", "kind", "peer"}; {"do": "called"}: how
often each of his own handlers was called; {"do": "lead", ...}: become the leader of a group and name its members.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import auth_pb2, averaging_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

RUN = "test"  # key of the swarm's averagers
PATIENCE = 15.0  # s for one call
LINGER = 5.0  # s; p2pd resets a stream that is closed by who answers, and what was not read by then is lost
JUNK = b"\x01"
QUESTIONS = {  # call of one message -> what it asks
    "rpc_get_chunk": [bytes(32), 0],
    "rpc_get_told": [0, 1],
    "rpc_tell": [b"none", 0, True],
    "rpc_show_part": [b"none", b"nobody", 0],
}
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


class Averager(ServicerBase):
    """Accepts whoever comes, and gives what it does not have."""

    async def rpc_introduce(self, request: auth_pb2.AccessToken, context: P2PContext) -> auth_pb2.AccessToken:
        called["rpc_introduce"] += 1
        return auth_pb2.AccessToken(signature=shown["token"])

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        called["rpc_join_group"] += 1
        async for message in Group.now.answer(request, context):
            yield message
        await asyncio.sleep(LINGER)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        called["rpc_aggregate_part"] += 1
        yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)
        await asyncio.sleep(LINGER)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        called["rpc_download_state"] += 1
        yield averaging_pb2.DownloadData(metadata=JUNK)
        await asyncio.sleep(LINGER)


class SwarmGradientAverager(Averager):
    async def rpc_tell(self, request: averaging_pb2.DownloadData, context: P2PContext) -> averaging_pb2.DownloadData:
        called["rpc_tell"] += 1
        return averaging_pb2.DownloadData(metadata=b"unknown")

    async def rpc_show_part(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        called["rpc_show_part"] += 1
        return averaging_pb2.DownloadData(metadata=b"lacks")


class SwarmStateAverager(Averager):
    async def rpc_get_chunk(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        called["rpc_get_chunk"] += 1
        return averaging_pb2.DownloadData(metadata=b"lacks")

    async def rpc_get_told(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        called["rpc_get_told"] += 1
        return averaging_pb2.DownloadData()


AVERAGERS = {
    "grad": (SwarmGradientAverager, f"{RUN}_grad_averager"),
    "state": (SwarmStateAverager, f"{RUN}_state_averager"),
}


def node(peer: PeerID) -> dht_pb2.NodeInfo:
    return dht_pb2.NodeInfo(node_id=DHTID.generate(peer.to_bytes()).to_bytes())


class Group:
    """What a leader says who has come to average: with `members`, that these are the group."""

    now: Group

    def __init__(self, members: list[PeerID] = (), words: list[bytes] = ()):
        self.members, self.words = list(members), list(words)

    async def answer(self, request: averaging_pb2.JoinRequest, context: P2PContext) -> AsyncIterator:
        if not self.members:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        peers = [context.remote_id, *self.members]
        yield averaging_pb2.MessageFromLeader(
            code=averaging_pb2.BEGIN_ALLREDUCE,
            group_id=DHTID.generate().to_bytes(),
            ordered_peer_ids=[peer.to_bytes() for peer in peers],
            gathered=[request.gather, *self.words],
        )
        await asyncio.sleep(1.0)  # what is closed from this side may be lost


Group.now = Group()


class Stranger:
    def __init__(self, p2p: P2P):
        self.p2p = p2p

    async def serve(self) -> None:
        await AdmittedDHTProtocol().add_p2p_handlers(self.p2p)
        for servicer, prefix in AVERAGERS.values():
            await servicer().add_p2p_handlers(self.p2p, namespace=prefix)

    async def show(self, token: str) -> dict:
        shown["token"] = bytes.fromhex(token)
        return {}

    async def called(self) -> dict:
        return {"called": dict(called)}

    async def call(self, servicer: str, kind: str, peer: str, **more: Any) -> dict:
        """:returns: {"got": what came back, in words, or null} and {"why": the error}"""
        made = self._call_node if servicer == "dht" else self._call_averager
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

    async def _call_averager(self, servicer: str, kind: str, peer: PeerID) -> str | None:
        cls, prefix = AVERAGERS[servicer]
        method = getattr(cls.get_stub(self.p2p, peer, namespace=prefix), kind)
        if kind == "rpc_introduce":
            answer = await method(auth_pb2.AccessToken(signature=shown["token"]))
            return f"a token of {len(answer.signature)} bytes"
        if kind in QUESTIONS:
            words = QUESTIONS[kind]
            answer = await method(averaging_pb2.DownloadData(metadata=MSGPackSerializer.dumps(words)))
            return f"{answer.ByteSize()} bytes"
        if kind == "rpc_join_group":
            words = MSGPackSerializer.dumps([0.0, 0, MSGPackSerializer.dumps([None, shown["token"]])])
            request = averaging_pb2.JoinRequest(
                schema_hash=b"none", expiration=get_dht_time() + 5, gather=words, group_key=f"{prefix}.0b"
            )
        else:
            request = averaging_pb2.DownloadRequest()
        if kind == "rpc_aggregate_part":
            request = one(averaging_pb2.AveragingData(group_id=b"none"))
        stream = await method(request)
        async for message in stream:
            await stream.aclose()
            return f"{message.ByteSize()} bytes"
        return None

    async def lead(self, through: list[str], member: str | None, words: str = "") -> dict:
        """Be found as a leader by whoever asks the nodes `through`, and name `member` to those who come. With None: no
        longer."""
        cls, prefix = AVERAGERS["grad"]
        own = self.p2p.peer_id
        if member is None:
            Group.now = Group()
            return {}
        mine = MSGPackSerializer.dumps([100.0, 0, MSGPackSerializer.dumps([None, shown["token"]])])
        theirs = MSGPackSerializer.dumps([100.0, 0, MSGPackSerializer.dumps([None, bytes.fromhex(words)])])
        Group.now = Group([own, PeerID.from_base58(member)], [mine, theirs])
        info = node(own)
        for peer in map(PeerID.from_base58, through):
            request = dht_pb2.StoreRequest(
                keys=[DHTID.generate(f"{prefix}.0b").to_bytes()], subkeys=[MSGPackSerializer.dumps(own.to_bytes())],
                values=[MSGPackSerializer.dumps(True)], expiration_time=[get_dht_time() + 0.9], in_cache=[False],
                peer=info,
            )  # fmt: skip
            request.auth.client_access_token.signature = shown["token"]
            await AdmittedDHTProtocol.get_stub(self.p2p, peer).rpc_store(request, timeout=PATIENCE)
        return {"called": dict(called)}


async def one(message: Any) -> AsyncIterator:
    yield message


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
