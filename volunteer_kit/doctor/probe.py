"""What is looked at in a process of its own, since it could hang or take the machine's signals:
`python -m volunteer_kit.doctor.probe device` or `... peer ADDRESS...`. Prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from volunteer_kit import output

PEER_START = 45.0  # s; p2pd alone needs more than 15 s on a busy Colab VM
CALL = 12.0  # s


def main() -> int:
    output.keep_up()
    verb, *words = sys.argv[1:]
    found = device() if verb == "device" else asyncio.run(peer(int(words[0]), words[1:]))
    print(json.dumps(found), flush=True)
    return 0


def device() -> dict:
    from volunteer_kit.device import detect_device

    found = detect_device()
    return {"name": found.name, "kind": found.kind, "free_gb": found.free_gb, "problems": list(found.problems)}


async def peer(port: int, addresses: list[str]) -> dict:
    """Dial each address through a p2pd that listens on `port` (0: any), and have one that answers call back.

    A stranger gets no further than this: a run's peers take calls of the DHT from admitted ones only.
    """
    from hivemind.p2p import P2P

    from volunteer_kit.doctor.autonat import call_back
    from volunteer_kit.swarm.peer import PeerConfig, decide_client_mode

    client_mode, why = decide_client_mode(PeerConfig(initial_peers=addresses))
    p2p = await P2P.create(host_maddrs=[f"/ip4/0.0.0.0/tcp/{port}"], startup_timeout=PEER_START)
    try:
        results = dict(zip(addresses, await asyncio.gather(*(_dial(p2p, a) for a in addresses)), strict=True))
        own = [str(maddr).partition("/p2p/")[0] for maddr in await p2p.get_visible_maddrs()]
        answer = None
        for address in [address for address, why_not in results.items() if not why_not][:3]:
            answer = await call_back(p2p, _peer_id(address), own)
            if answer.status in ("reached", "not reached"):
                break
    finally:
        await p2p.shutdown()
    return {
        "results": results, "client_mode": client_mode, "why": why,
        "answer": answer.status if answer else None, "address": answer.address if answer else "",
    }  # fmt: skip


async def _dial(p2p, address: str) -> str:
    """Why it cannot be called; "" if it can. Its port is tried first: p2pd is content with any address of the peer."""
    from hivemind.utils.multiaddr import Multiaddr

    from volunteer_kit.swarm.reach import split_address

    try:
        host, port, _ = split_address(address)
        if port is not None:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CALL)
            writer.close()
        plain = Multiaddr(address.rpartition("/p2p/")[0])
        await asyncio.wait_for(p2p._client.connect(_peer_id(address), [plain]), CALL)
    except ConnectionRefusedError:
        return in_words("refused")
    except asyncio.TimeoutError:
        return f"no answer within {CALL:.0f} s"
    except Exception as error:
        return in_words(str(error) or type(error).__name__)
    return ""


def _peer_id(address: str):
    from hivemind.p2p import PeerID

    return PeerID.from_base58(address.rpartition("/")[2])


def in_words(error: str) -> str:
    """p2pd's reason for a vain call."""
    text = error.lower()
    for sign, words in (
        ("refused", "its machine is there, but no peer runs on that port"),
        ("peer id mismatch", "another peer answers there: its identity has changed"),
        ("no route", "no way leads there"),
        ("unreachable", "no way leads there"),
        ("name or service", "its name is not known"),
        ("timeout", "no answer"),
        ("timed out", "no answer"),
        ("deadline", "no answer"),
    ):
        if sign in text:
            return words
    return error.splitlines()[0][:160] if error else "it cannot be called"


if __name__ == "__main__":
    sys.exit(main())
