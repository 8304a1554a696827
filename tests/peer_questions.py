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
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from volunteer_kit.auth.access_token import Trust
from volunteer_kit.session.membership import Membership
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.records.credentials import AdmissionKeeper
from volunteer_kit.swarm.records.host_credentials import HostMembership

PATIENCE = 20.0  # s for one call; a stranger may answer nothing


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


# --- in the DHT's process: calls to others, by the stub that it makes them with ---


async def call_node(dht: Any, node: Any, peer: bytes, kind: str) -> str:
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
    """Answers them, from any thread."""

    def __init__(self, peer: Peer):
        self.peer, self._answered = peer, 0

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

    def call(self, kind: str, peer: str) -> dict:
        """Call `peer` as another node of the DHT."""
        peer_id = PeerID.from_base58(peer).to_bytes()
        return {"outcome": self.peer.dht.run_coroutine(functools.partial(call_node, peer=peer_id, kind=kind))}
