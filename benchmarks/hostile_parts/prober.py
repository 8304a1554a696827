"""An honest client that asks every process of the honest peers, again and again, whether it is there.

argv[1]: JSON {"targets", "prefix", "protocol", "token", "identity", "http"}. stdout: an event "probe" a question:
`target`, `since` (when the first of the questions in vain was asked, or this one), `at`, `ok`; times are monotonic.
stdin: {"do": "token", "token"}, {"do": "newcomer", "identity", "token"}: a peer that nobody knows connects to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from benchmarks.hostile_parts.hostile_peer import CONTROL, HostilePeer, Target
from volunteer_kit.swarm.net.peer import raise_file_limit

EVERY = 0.25  # s between two questions to a process
PATIENCE = 2.0  # s for an answer
HTTP_EVERY = 0.5  # s
HONEST = "127.0.0.2"  # address of the honest browser
NEWCOMER_PATIENCE = 12.0  # s
_lock = threading.Lock()


def say(event: str, **fields: Any) -> None:
    with _lock:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


async def never(seconds: float) -> None:
    pass


def make(p2p: P2P, settings: dict, token: bytes) -> HostilePeer:
    """The attackers' own way to call, with an honest peer's questions."""
    targets = [Target(**target) for target in settings["targets"]]
    about = {name: settings[name] for name in ("prefix", "protocol")}
    return HostilePeer(
        p2p, token, targets, **about, authority="", dashboard="", deadline=float("inf"), hold=never
    )  # fmt: skip


async def probe(peer: HostilePeer, target: Target, kind: str) -> None:
    name, since = f"{target.name}: {'DHT' if kind == 'dht' else kind}", None
    while True:
        asked = time.monotonic()
        since = asked if since is None else since
        ok = await ask(peer, target, kind, PATIENCE)
        say("probe", target=name, since=since, at=time.monotonic(), ok=ok)
        if ok:
            since = None
        else:
            with contextlib.suppress(Exception):  # its connection may be gone
                address = Multiaddr(target.maddr.partition("/p2p/")[0])
                await asyncio.wait_for(peer.p2p._client.connect(target.peer, [address]), PATIENCE)
        await asyncio.sleep(max(0.05, EVERY - (time.monotonic() - asked)))


async def ask(peer: HostilePeer, target: Target, kind: str, patience: float) -> bool:
    from hivemind.proto import dht_pb2

    try:
        if kind == "dht":
            request = peer.signed(dht_pb2.PingRequest())
            await peer.unary(target, peer.handler("dht", "rpc_ping"), request, patience)
        else:
            return bool(await peer.say(target, CONTROL, peer.greeting(), patience))
        return True
    except Exception as error:
        return "refused at" in str(error)  # an answer, too


def browse(name: str, url: str) -> None:
    at, since = urlsplit(url), None
    while True:
        asked = time.monotonic()
        since = asked if since is None else since
        ok, why = False, ""
        try:
            client = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE, source_address=(HONEST, 0))
            client.request("GET", at.path)
            status = client.getresponse().status
            ok, why = status == 200, str(status)
            client.close()
        except OSError as error:
            why = type(error).__name__
        except http.client.HTTPException as error:
            why = type(error).__name__
        say("probe", target=name, since=since, at=time.monotonic(), ok=ok, why=why)
        since = None if ok else since
        time.sleep(HTTP_EVERY)


async def newcomer(settings: dict, identity: str, token: str) -> dict:
    """:returns: s until it had spoken to all, or whom it could not reach"""
    began, lost = time.monotonic(), []
    p2p = await P2P.create(identity_path=identity, startup_timeout=30, check_if_identity_free=False)
    try:
        peer = make(p2p, settings, bytes.fromhex(token))
        for target in peer.targets:
            deadline = time.monotonic() + NEWCOMER_PATIENCE
            address = Multiaddr(target.maddr.partition("/p2p/")[0])
            while True:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(p2p._client.connect(target.peer, [address]), 3.0)
                    if await ask(peer, target, "dht", 3.0):
                        break
                if time.monotonic() > deadline:
                    lost.append(target.name)
                    break
                await asyncio.sleep(0.2)
    finally:
        await p2p.shutdown()
    return {"lost": lost, "seconds": time.monotonic() - began}


async def protocol_of(p2p: P2P, settings: dict) -> str:
    """The name by which the run's nodes know their handlers."""
    for name in ("AdmittedDHTProtocol", "DHTProtocol"):
        peer = make(p2p, {**settings, "protocol": name}, bytes.fromhex(settings["token"]))
        await peer.connect()
        if await ask(peer, peer.victim, "dht", 5.0):
            return name
    raise SystemExit("no node answers a ping")


async def main() -> None:
    settings = json.loads(sys.argv[1])
    raise_file_limit()
    p2p = await P2P.create(
        initial_peers=[settings["targets"][0]["maddr"]], identity_path=settings["identity"], startup_timeout=60,
        check_if_identity_free=False,
    )  # fmt: skip
    settings["protocol"] = await protocol_of(p2p, settings)
    peer = make(p2p, settings, bytes.fromhex(settings["token"]))
    await peer.connect()
    say("ready", protocol=settings["protocol"])
    kinds = [(target, kind) for target in peer.targets for kind in ("dht", "node")]
    probes = [probe(peer, target, kind) for target, kind in kinds if kind == "dht" or target.node]
    tasks = [asyncio.ensure_future(each) for each in probes]
    for name, url in settings["http"].items():
        threading.Thread(target=browse, args=(name, url), daemon=True).start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "token":
            peer.token = bytes.fromhex(order["token"])
        else:
            say("newcomer", **await newcomer(settings, order["identity"], order["token"]))
    for task in tasks:
        task.cancel()
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
