"""What a test asks a running peer of tests/swarm_peer.py: whom it refuses, and to call somebody as it calls everybody.

A question is a line of JSON on stdin, {"ask": NAME, ...}; the answer an event "answer" with the same number.
"""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time

from volunteer_kit.auth.access_token import Trust
from volunteer_kit.session.membership import Membership
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.host_membership import HostMembership
from volunteer_kit.swarm.keeper import AdmissionKeeper
from volunteer_kit.swarm.peer import Peer

PATIENCE = 20.0  # s for one call; a stranger may answer nothing
QUESTIONS = {  # call of one message -> what it asks: about a state and a round that nobody has
    "rpc_get_chunk": [bytes(32), 0],
    "rpc_get_told": [0, 1],
    "rpc_tell": [b"none", 0, True],
    "rpc_show_part": [b"none", b"nobody", 0],
    "rpc_count_answers": [b"none", 0, 0],
    "rpc_show_answer": [b"none", 0, 0],
}


class Shown:
    """One token that does not change; or none, in a run without an authority."""

    def __init__(self, trust: Trust | None, envelope: bytes):
        self.admission, self._keeper = Admission(trust), None
        if trust is not None:
            self.admission.set_own(envelope)

    def keep(self, peer: Peer) -> None:
        if not self.admission.is_open:
            self._keeper = AdmissionKeeper(peer)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()


def membership(settings: dict) -> Shown | HostMembership | Membership:
    """By the settings of a peer: `token` (hex), or `authority` (its address) with `keys` (the host's folder) or
    `hf_token` (a volunteer's login); all with `run_id`, `public_key` and `identity` (a path). None of them: open."""
    if "public_key" not in settings:
        return Shown(None, b"")
    run_id, public_key, identity = settings["run_id"], settings["public_key"], settings["identity"]
    if "token" in settings:
        return Shown(Trust.of(run_id, public_key), bytes.fromhex(settings["token"]))
    url = settings["authority"]
    if "keys" in settings:
        return HostMembership(run_id, url, public_key, settings["keys"], identity, "host")
    run = SimpleNamespace(run_id=run_id, authority=SimpleNamespace(url=url, public_key=public_key))
    member = Membership(run, identity, settings["hf_token"])
    member.ask()
    return member


# --- calls to others, from the process that makes them and by the stub that it makes them with ---


async def call_averager(self: SwarmAverager, peer: bytes, kind: str, result: MPFuture) -> None:
    """In the averager's process: `result` is how it went, in words."""
    result.set_result(await outcome(call_by_stub(self, PeerID(peer), kind)))


async def call_by_stub(averager: SwarmAverager, peer: PeerID, kind: str) -> Any:
    stub = averager.get_stub(averager._p2p, peer, namespace=averager.prefix)
    method = getattr(stub, kind)
    if kind == "rpc_join_group":
        return await anext(await method(averaging_pb2.JoinRequest(schema_hash=b"none", group_key="none")))
    if kind == "rpc_aggregate_part":
        return await anext(await method(one(averaging_pb2.AveragingData(group_id=b"none"))))
    if kind == "rpc_download_state":
        return await anext(await method(averaging_pb2.DownloadRequest()))
    return await method(averaging_pb2.DownloadData(metadata=MSGPackSerializer.dumps(QUESTIONS[kind])))


async def call_node(dht: Any, node: Any, peer: bytes, kind: str) -> str:
    """In the DHT's process."""
    stub, key = node.protocol.get_stub(PeerID(peer)), DHTID.generate("of a test").to_bytes()
    info = dht_pb2.NodeInfo()
    request = {
        "rpc_ping": dht_pb2.PingRequest(peer=info),
        "rpc_find": dht_pb2.FindRequest(keys=[key], peer=info),
        "rpc_store": dht_pb2.StoreRequest(
            keys=[key], subkeys=[node.protocol.IS_REGULAR_VALUE], values=[b"\x01"], in_cache=[False], peer=info,
            expiration_time=[get_dht_time() + 30],
        ),
    }[kind]  # fmt: skip
    return await outcome(getattr(stub, kind)(request, timeout=PATIENCE))


async def one(message: Any) -> Any:
    yield message


async def outcome(call: Any) -> str:
    """ "answered", or the error in words."""
    try:
        await asyncio.wait_for(call, PATIENCE)
        return "answered"
    except BaseException as error:
        return repr(error)[:400]


async def kept_here(dht: Any, node: Any, key: str) -> bool:
    """In the DHT's process: does this very node hold anything under `key`?"""
    key_id = DHTID.generate(key)
    return any(part.get(key_id) is not None for part in (node.protocol.storage, node.protocol.cache))


class Questions:
    """Answers them, from any thread. `optimizer` is set once it is there."""

    def __init__(self, peer: Peer):
        SwarmAverager.call_for_test = call_averager  # before the averagers are forked
        self.peer, self.optimizer, self._answered = peer, None, 0

    def answer(self, question: dict) -> dict:
        name = question.pop("ask")
        found = {"number": self._answered, **getattr(self, name)(**question)}
        self._answered += 1
        return found

    def refused(self) -> dict:
        return {"refused": [[*cell, count] for cell, count in self.peer.admission.refused.items()]}

    def verdicts(self, peers: list[str]) -> dict:
        """Why each may not take part; None: it may."""
        reasons = {peer: self.peer.admission.reason_to_refuse(PeerID.from_base58(peer)) for peer in peers}
        return {"verdicts": reasons, "bans": self.peer.admission.bans.version}

    def kept(self, key: str) -> dict:
        return {"kept": self.peer.dht.run_coroutine(functools.partial(kept_here, key=key))}

    def call(self, averager: str, kind: str, peer: str) -> dict:
        """Call `peer`: as a DHT node (averager "dht"), or as one of the averagers ("state", "grad")."""
        peer_id = PeerID.from_base58(peer).to_bytes()
        if averager == "dht":
            return {"outcome": self.peer.dht.run_coroutine(functools.partial(call_node, peer=peer_id, kind=kind))}
        chosen = self.optimizer.state_averager if averager == "state" else self.optimizer.grad_averager
        result = MPFuture()
        chosen._outer_pipe.send(("call_for_test", [peer_id, kind, result], {}))
        return {"outcome": result.result(timeout=2 * PATIENCE)}
