"""What is looked at in a process of its own, since it could hang or take the machine's signals:
`python -m volunteer_kit.doctor.probe device`, `... fork`, `... peer PORT may_ask|may_not_ask ADDRESS...`,
`... key FILE ADDRESS...` or `... records RUN_ID FILE ADDRESS...`. Prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from volunteer_kit import output

PEER_START = 45.0  # s; p2pd alone needs more than 15 s on a busy Colab VM
CALL = 12.0  # s


def main() -> int:
    output.keep_up()
    verb, *words = sys.argv[1:]
    print(json.dumps(LOOKS[verb](*words)), flush=True)
    return 0


def key(file: str, *addresses: str) -> dict:
    from volunteer_kit.doctor.same_key import ask

    return asyncio.run(ask(file, addresses))


def fork() -> dict:
    from volunteer_kit.doctor.start_method import try_fork

    return try_fork()


def records(run_id: str, file: str, *addresses: str) -> dict:
    from volunteer_kit.doctor.records import read

    return read(run_id, file, addresses)


def device() -> dict:
    from volunteer_kit.device import detect_device

    found = detect_device()
    return {"name": found.name, "kind": found.kind, "free_gb": found.free_gb, "problems": list(found.problems)}


def peer(port: str, may_ask: str, *addresses: str) -> dict:
    """Dial each address through a p2pd, and find out as a joining peer does whether others can call this machine.

    A stranger gets no further than this: a run's peers take calls of the DHT from admitted ones only.

    :param port: to listen on; 0: any
    :param may_ask: "may_ask": the port is ours to be tried
    """
    from volunteer_kit.addressing import LISTEN
    from volunteer_kit.swarm.net import reachability
    from volunteer_kit.swarm.net.dial_back import ask_first_peers

    results = asyncio.run(_dial_all(addresses))
    answering = [address for address, why_not in results.items() if not why_not]
    host_maddrs = [maddr.replace("/tcp/0", f"/tcp/{port}") for maddr in LISTEN]
    machine, places = reachability.look_at_machine(host_maddrs), reachability.find_places(addresses)
    verdict, answers = reachability.by_addresses(machine, places), {}
    if may_ask == "may_ask":
        asked = [place for place in places if place.maddr in answering]
        answers = ask_first_peers(machine, asked, host_maddrs)
        verdict = reachability.by_answers(verdict, machine, places, answers)
    return {
        "results": results, "client_mode": verdict.client_mode, "why": verdict.why, "situation": machine.in_words,
        "is_local": reachability.is_local_swarm(machine, places),
        "here": [place.maddr for place in places if place.is_here],
        "answers": {reachability.FAMILIES[family]: reachability.summary(said) for family, said in answers.items()},
    }  # fmt: skip


async def _dial_all(addresses: Sequence[str]) -> dict[str, str]:
    """Address -> "" if it answers as who it should be, or why not."""
    from hivemind.p2p import P2P

    from volunteer_kit.addressing import LISTEN

    p2p = await P2P.create(host_maddrs=[*LISTEN], startup_timeout=PEER_START)
    try:
        return dict(zip(addresses, await asyncio.gather(*(_dial(p2p, a) for a in addresses)), strict=True))
    finally:
        await p2p.shutdown()


async def _dial(p2p, address: str) -> str:
    """Why it cannot be called; "" if it can. Its port is tried first: p2pd is content with any address of the peer."""
    from hivemind.utils.multiaddr import Multiaddr

    from volunteer_kit.swarm.net.connectivity import split_address

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
        ("all dials failed", "no call gets through"),
    ):
        if sign in text:
            return words
    return error.splitlines()[0][:160] if error else "it cannot be called"


LOOKS = {"device": device, "fork": fork, "peer": peer, "key": key, "records": records}


if __name__ == "__main__":
    sys.exit(main())
